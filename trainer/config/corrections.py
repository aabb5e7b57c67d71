"""Corrections for tokens sampled by older weights or by an engine with different numerics."""

from typing import Literal

from pydantic import Field, model_validator

from offbeat.trainer.config.conditions import ConditionalConfig


class ImportanceWeight(ConditionalConfig):
    """Weight of each token's loss: pi_old / pi_behavior over a unit, clamped and detached."""

    weight_type: Literal["token", "turn", "geometric", "sequence"] = "token"
    """Unit of the ratio. `turn` and `geometric` (a sequence): geometric mean over tokens; `sequence`: product."""
    lower_bound: float = Field(default=0.0, ge=0)
    """Lower clamp of the weight."""
    upper_bound: float = Field(default=2.0, gt=0)
    """Upper clamp of the weight."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "ImportanceWeight":
        if self.lower_bound >= self.upper_bound:
            raise ValueError(f"lower_bound {self.lower_bound} is not below upper_bound {self.upper_bound}")
        return self


class MismatchFilter(ConditionalConfig):
    """Mask for tokens, turns or sequences whose policy is too far from the behavior policy: they carry no policy
    gradient."""

    agg_type: Literal["token", "turn", "geometric", "sequence"] = "token"
    """Unit that is measured and masked. `turn` and `geometric` (a sequence): mean per token; `sequence`: product of ratios,
    or sum of the other measures."""
    ratio_low: float | None = Field(default=None, ge=0)
    ratio_high: float | None = Field(default=None, gt=0)
    """Bounds on pi / pi_behavior."""
    diff_low: float | None = Field(default=None, le=0)
    diff_high: float | None = Field(default=None, ge=0)
    """Bounds on pi - pi_behavior."""
    binary_kl_high: float | None = Field(default=None, gt=0)
    """Bound on the larger of the two divergences between "this token" and "any other" (KPop), nats."""

    @model_validator(mode="after")
    def _has_bounds(self) -> "MismatchFilter":
        bounds = (self.ratio_low, self.ratio_high, self.diff_low, self.diff_high, self.binary_kl_high)
        if all(bound is None for bound in bounds):
            raise ValueError("has no bounds: set ratio_low, ratio_high, diff_low, diff_high or binary_kl_high")
        if self.ratio_low is not None and self.ratio_high is not None and self.ratio_low >= self.ratio_high:
            raise ValueError(f"ratio_low {self.ratio_low} is not below ratio_high {self.ratio_high}")
        return self


class TrainInferCorrection(ConditionalConfig):
    """Corrections for tokens sampled by older weights or by an engine with different numerics."""

    is_weight: ImportanceWeight | None = None
    """Importance weights of the policy at the start of the step against the behavior policy; needs `old_logprobs: recompute`
    or `loglinear`."""
    filters: tuple[MismatchFilter, ...] = ()
    """Masks; what any of them masks is masked."""
    m2_threshold: float | None = Field(default=None, gt=0)
    """Bound on the mean squared log-ratio of a batch; the tokens with the largest ones are masked until it holds (M2PO; 0.04
    in the paper). Needs `old_logprobs: recompute`."""
