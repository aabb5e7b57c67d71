"""Off-policy corrections."""

from typing import Literal

from pydantic import Field, model_validator

from offbeat.trainer.config.conditions import ConditionalConfig
from offbeat.trainer.config.user_function import UserFunction


class ImportanceWeight(ConditionalConfig):
    """Loss weight per token: pi_old / pi_behavior over a unit, clamped and detached."""

    weight_type: Literal["token", "turn", "geometric", "sequence"] = "token"
    """Unit of the ratio. `turn`, `geometric` (sequence): geometric mean over tokens; `sequence`: product."""
    lower_bound: float = Field(default=0.0, ge=0)
    """Lower clamp."""
    upper_bound: float = Field(default=2.0, gt=0)
    """Upper clamp."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "ImportanceWeight":
        if self.lower_bound >= self.upper_bound:
            raise ValueError(f"lower_bound {self.lower_bound} is not below upper_bound {self.upper_bound}")
        return self


class MismatchFilter(ConditionalConfig):
    """Mask of policy gradients too far from the behavior policy."""

    agg_type: Literal["token", "turn", "geometric", "sequence"] = "token"
    """Unit measured and masked. `turn`, `geometric` (sequence): mean per token; `sequence`: product of ratios, sum of
    other measures.
    """
    ratio_low: float | None = Field(default=None, ge=0)
    ratio_high: float | None = Field(default=None, gt=0)
    """Bounds on pi / pi_behavior."""
    diff_low: float | None = Field(default=None, le=0)
    diff_high: float | None = Field(default=None, ge=0)
    """Bounds on pi - pi_behavior."""
    binary_kl_high: float | None = Field(default=None, gt=0)
    """Bound, in nats, on the larger KL of both directions of "this token or another" (KPop)."""

    @model_validator(mode="after")
    def _has_bounds(self) -> "MismatchFilter":
        bounds = (self.ratio_low, self.ratio_high, self.diff_low, self.diff_high, self.binary_kl_high)
        if all(bound is None for bound in bounds):
            raise ValueError("has no bounds: set ratio_low, ratio_high, diff_low, diff_high or binary_kl_high")
        if self.ratio_low is not None and self.ratio_high is not None and self.ratio_low >= self.ratio_high:
            raise ValueError(f"ratio_low {self.ratio_low} is not below ratio_high {self.ratio_high}")
        return self


class TrainInferCorrection(ConditionalConfig):
    """Corrections for tokens of older weights or another engine."""

    is_weight: ImportanceWeight | None = None
    """Importance weights at the start of the step; need `old_logprobs: recompute` or `loglinear`."""
    filters: tuple[MismatchFilter, ...] = ()
    """Masks, combined by union."""
    function: UserFunction | None = None
    """Weights and masks of your own, `module:function`, besides the others."""
    m2_threshold: float | None = Field(default=None, gt=0)
    """Bound on a batch's mean squared log-ratio; the largest are masked (M2PO; 0.04 in the paper). Needs `old_logprobs:
    recompute`.
    """
