"""Preference optimization (`pipeline: dpo`)."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.trainer.config.conditions import ConditionalConfig, OnlyWith

LossType = Literal["sigmoid", "ipo", "hinge", "robust", "simpo", "orpo", "apo_zero", "apo_down", "kto"]
WITH_SFT_TERM = ("sigmoid", "ipo", "hinge", "robust", "simpo", "apo_zero", "apo_down")
"""`orpo` has one already."""
REFERENCE_FREE = ("simpo", "orpo")
"""Losses without a reference."""


class PreferenceConfig(ConditionalConfig):
    """Loss of pairs of a chosen and a rejected response."""

    loss_type: LossType = "sigmoid"
    """`sigmoid`: DPO (arXiv:2305.18290), with `label_smoothing` cDPO; `ipo` (2310.12036), `hinge` (SLiC, 2305.10425),
    `robust` (2403.00409), `apo_zero` and `apo_down` (2408.06266); without reference `simpo` (2405.14734) and `orpo`
    (2403.07691). `kto` (2402.01306): rows with one response and a label.
    """
    beta: float = Field(default=0.1, gt=0)
    """Scale of the rewards, beta * (logprob - reference's); `ipo`'s tau, `orpo`'s lambda."""
    label_smoothing: Annotated[float, OnlyWith(loss_type=("sigmoid", "robust"))] = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a pair's labels are swapped."""
    reference_free: Annotated[
        bool, OnlyWith(loss_type=("sigmoid", "ipo", "hinge", "robust", "apo_zero", "apo_down"))
    ] = False
    """Rewards relative to the uniform policy instead of the reference."""
    length_normalization: Annotated[bool, OnlyWith(loss_type=("sigmoid", "hinge", "robust"))] = False
    """Mean instead of the sum of a response's logprobs, as always in `ipo`, `simpo` and `orpo`."""
    simpo_gamma: Annotated[float, OnlyWith(loss_type=("simpo",))] = Field(default=0.5, ge=0)
    """Margin of the chosen response's reward."""
    desirable_weight: Annotated[float, OnlyWith(loss_type=("kto",))] = Field(default=1.0, gt=0)
    """Factor of desirable responses' loss."""
    undesirable_weight: Annotated[float, OnlyWith(loss_type=("kto",))] = Field(default=1.0, gt=0)
    """Factor of undesirable responses' loss."""
    precompute_ref_log_probs: Annotated[bool, OnlyWith(reference_free=(False,))] = False
    """Scoring of all rows by the reference before training; its logprobs are kept in files beside the dataset, and it
    takes no memory during training.
    """
    sft_coef: Annotated[
        float, OnlyWith(loss_type=("sigmoid", "ipo", "hinge", "robust", "simpo", "apo_zero", "apo_down"))
    ] = Field(default=0.0, ge=0)
    """Coefficient of the chosen responses' negative log-likelihood per token (RPO, arXiv:2404.19733)."""

    @property
    def needs_reference(self) -> bool:
        return self.loss_type not in REFERENCE_FREE and not self.reference_free

    @property
    def takes_means(self) -> bool:
        """Return whether a response's logprob is the mean over its tokens."""
        return self.length_normalization or self.loss_type in ("ipo", *REFERENCE_FREE)
