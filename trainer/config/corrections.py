"""What is done about tokens that other weights, or another engine, sampled."""

from typing import Literal

from pydantic import Field, model_validator

from offbeat.trainer.config.conditions import ConditionalConfig


class ImportanceWeight(ConditionalConfig):
    """What each token's loss is multiplied with: (pi_old / pi_behavior over a unit), within bounds, detached."""

    weight_type: Literal["token", "turn", "geometric", "sequence"] = "token"
    """The unit: `turn` and `geometric` (a sequence) by the mean per token, `sequence` as a product."""
    lower_bound: float = Field(default=0.0, ge=0)
    upper_bound: float = Field(default=2.0, gt=0)

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "ImportanceWeight":
        if self.lower_bound >= self.upper_bound:
            raise ValueError(f"lower_bound {self.lower_bound} is not below upper_bound {self.upper_bound}")
        return self


class MismatchFilter(ConditionalConfig):
    """Tokens, turns or sequences whose policy is too far from the one that sampled carry no policy gradient."""

    agg_type: Literal["token", "turn", "geometric", "sequence"] = "token"
    """The unit that is judged and dropped: `turn` and `geometric` (a sequence) by the mean per token, `sequence` by the
    product (of ratios) or the sum (of the others)."""
    ratio_low: float | None = Field(default=None, ge=0)
    ratio_high: float | None = Field(default=None, gt=0)
    """Bounds on pi / pi_behavior."""
    diff_low: float | None = Field(default=None, le=0)
    diff_high: float | None = Field(default=None, ge=0)
    """Bounds on pi - pi_behavior."""
    binary_kl_high: float | None = Field(default=None, gt=0)
    """Bound on the larger of the two divergences between "this token" and "any other" (KPop), nats."""

    @model_validator(mode="after")
    def _judges(self) -> "MismatchFilter":
        bounds = (self.ratio_low, self.ratio_high, self.diff_low, self.diff_high, self.binary_kl_high)
        if all(bound is None for bound in bounds):
            raise ValueError("bounds nothing: give ratio_low, ratio_high, diff_low, diff_high or binary_kl_high")
        if self.ratio_low is not None and self.ratio_high is not None and self.ratio_low >= self.ratio_high:
            raise ValueError(f"ratio_low {self.ratio_low} is not below ratio_high {self.ratio_high}")
        return self


class TrainInferCorrection(ConditionalConfig):
    """What is done about tokens that older weights, or an engine of other numerics, sampled."""

    is_weight: ImportanceWeight | None = None
    """Importance weights of the step's start against what sampled; needs `old_logprobs` recompute or loglinear."""
    filters: tuple[MismatchFilter, ...] = ()
    """Applied together: what one of them drops is dropped."""
    m2_threshold: float | None = Field(default=None, gt=0)
    """M2PO: the largest squared log-ratios go until their mean over the batch is at most this (0.04 in the paper); needs
    `old_logprobs: recompute`."""
