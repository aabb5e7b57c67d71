"""What is optimised: estimator, loss, corrections, regularisation, selection. docs/algorithms.md has formulas and papers.

These keys stand at the root of a run's YAML and have ROLL's names where ROLL has them.
"""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from offbeat.trainer.config.conditions import (
    SET,
    ConditionalConfig,
    NotWith,
    OnlyWith,
)
from offbeat.trainer.config.corrections import TrainInferCorrection
from offbeat.trainer.config.reference import TeacherConfig
from offbeat.trainer.config.rewards import Over, RewardNormalization, RewardShaping
from offbeat.trainer.config.schedule import Scheduler

Estimator = Literal[
    "gae",
    "reinforce",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "opo",
    "maxrl",
    "gigpo",
    "step_reinforce",
    "agentic_reinforce",
    "remax",
    "opd",
]
RewardMethod = Literal["identity", "mean", "mean_std", "std"]

COMPARING: dict[str, RewardMethod] = {
    "grpo": "mean_std",
    "gigpo": "mean_std",
    "dr_grpo": "mean",
    "reinforce_plus_plus_baseline": "mean",
}
"""Estimators that subtract their group's mean, and whether they divide by its deviation unless told otherwise."""
BASELINES = ("rloo", "opo", "maxrl", "remax")
"""Estimators that compare a group's episodes in a way of their own."""
GREEDY_BASELINE = ("remax",)
"""Estimators that compare them with a greedy episode of the same task, played beside them."""
NEEDS_GROUPS = (*COMPARING, *(name for name in BASELINES if name not in GREEDY_BASELINE))
TURN_WISE = ("gigpo", "step_reinforce")
"""Estimators that rate turns and know no reward per token."""
WHITENING = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
DISTILLING = ("opd",)
"""Estimators that look at teachers and at no reward."""
NO_REWARD = (
    "a teacher's judgement is all that it learns from: leave it out, or take another adv_estimator with use_opd=true"
)
WITH_RATIO = ("ppo", "tis", "cispo", "topr", "sapo")
"""Losses whose ratio may be taken over a turn or a sequence."""
AGAINST_BEHAVIOR = ("aipo", "dppo_tv")
"""Losses whose ratio is to what sampled, whatever the policy of the step's start says."""


class AlgorithmConfig(ConditionalConfig):
    """Estimator, loss and regularisation."""

    sequence_length: int = Field(default=512, ge=2)
    """Longest trajectory, tokens."""

    # --- From rewards to advantages
    adv_estimator: Estimator = "grpo"
    """How rewards become advantages. `gae` builds a critic; `grpo`, `dr_grpo`, `rloo`, `opo`, `maxrl`, `gigpo` and
    `reinforce_plus_plus_baseline` compare the members of a group; `remax` has a greedy episode played beside each group and
    compares with that; `step_reinforce` and `gigpo` rate turns; `opd` asks teachers."""
    use_opd: Annotated[bool, NotWith("it is distilled already", adv_estimator=DISTILLING)] = False
    """On-policy distillation beside the rewards: subtract the KL to the teachers from each token's advantage.
    `adv_estimator: opd` learns from teachers alone (ROLL's `is_pure_opd`)."""
    teacher: dict[str, TeacherConfig] = Field(default_factory=dict[str, TeacherConfig])
    """By names of one's own; with several, those that teach a tag add up."""
    reward_normalization: RewardNormalization = RewardNormalization()
    reward_shaping: Annotated[RewardShaping, NotWith(NO_REWARD, adv_estimator=DISTILLING)] = RewardShaping()
    gae_level: Annotated[Literal["token", "turn"], OnlyWith(adv_estimator=("gae",))] = "token"
    """What one action is: a token, or a whole turn, whose value is read before its first token."""
    value_targets: Annotated[Literal["gae", "vtrace"], OnlyWith(adv_estimator=("gae",), gae_level=("token",))] = "gae"
    """What the critic learns: returns as sampled, or V-trace, which corrects them for what other weights sampled; needs
    `old_logprobs: recompute`."""
    vtrace_rho_bar: Annotated[float, OnlyWith(value_targets=("vtrace",))] = Field(default=1.0, gt=0)
    vtrace_c_bar: Annotated[float, OnlyWith(value_targets=("vtrace",))] = Field(default=1.0, gt=0)
    gamma: Annotated[
        float,
        NotWith("take step_reward_gamma", adv_estimator=TURN_WISE),
        NotWith(NO_REWARD, adv_estimator=DISTILLING),
    ] = Field(default=1.0, ge=0, le=1)
    """Discount for each sampled token; for each turn with `agentic_reinforce` and `gae_level: turn`. Observations take no
    time."""
    lambd: Annotated[float, OnlyWith(adv_estimator=("gae",))] = Field(default=0.95, ge=0, le=1)
    step_reward_gamma: Annotated[float, OnlyWith(adv_estimator=TURN_WISE)] = Field(default=0.95, ge=0, le=1)
    """Discount for each turn."""
    episode_reward_weight: Annotated[float, OnlyWith(adv_estimator=("gigpo",))] = Field(default=1.0, ge=0)
    step_reward_weight: Annotated[float, OnlyWith(adv_estimator=("gigpo",))] = Field(default=1.0, ge=0)
    reward_clip: Annotated[float | None, NotWith("take advantage_clip", adv_estimator=(*TURN_WISE, *DISTILLING))] = (
        Field(default=None, gt=0)
    )
    """Bound on a reward's size, after normalisation and before the KL penalty."""
    whiten_rewards: Annotated[bool, NotWith("take whiten_advantages", adv_estimator=(*TURN_WISE, *DISTILLING))] = False
    """Divide the token rewards, KL penalty included, by their standard deviation over the batch."""
    whiten_advantages: bool | None = None
    """Zero mean and unit deviation over the batch's tokens. None takes the estimator's own: true for `reinforce_plus_plus`
    and `reinforce_plus_plus_baseline`, false for the others."""
    advantage_clip: float | None = Field(default=None, gt=0)

    # --- Which of them are learnt from
    zero_variance: Literal["mask", "refill", "train"] = "mask"
    """A group without signal: one that is compared within itself and whose members all have the same reward, or that a
    filter below refuses. `mask` consumes it without computing on it, yet counts it in the policy loss's denominators;
    `refill` drops it and takes another (DAPO's dynamic sampling); `train` computes on it like on any other."""
    group_filter_cls: Annotated[str | None, OnlyWith(zero_variance=("mask", "refill"))] = None
    """`module:Class`, made without arguments; called with a `Group`, returns whether to train on it."""
    difficulty_mask: Annotated[bool, OnlyWith(zero_variance=("mask", "refill"))] = False
    """Learn only from groups whose mean reward is strictly between the two thresholds."""
    difficulty_low_threshold: Annotated[float, OnlyWith(difficulty_mask=(True,))] = 0.0
    difficulty_high_threshold: Annotated[float, OnlyWith(difficulty_mask=(True,))] = 1.0
    variance_filter_ratio: float = Field(default=1.0, gt=0, le=1)
    """StarPO-S: the share of a step's groups, those with the highest deviation of rewards, that is trained on."""
    max_len_mask: bool = False
    """Leave episodes out of the loss that ended for want of room (`sequence_length`)."""
    error_max_len_clip: bool = False
    """Leave episodes out of the loss that have no positive reward and more than `error_max_len_threshold` sampled tokens."""
    error_max_len_threshold: Annotated[int, OnlyWith(error_max_len_clip=(True,))] = Field(default=1024, ge=1)
    difficulty_loss_weight: bool = False
    """Weigh each episode's policy loss by 0.5 + 1.5 (1 - mean reward of its group, kept within 0 and 1)."""
    length_loss_weight: bool = False
    """Weigh each episode's policy loss by 1.5 - its sampled tokens over the batch's most."""

    # --- The policy's loss
    pg_variant: Literal["ppo", "vanilla", "tis", "cispo", "topr", "kimi15", "aipo", "dppo_tv", "sapo", "gpg"] = "ppo"
    """What is minimised for each token. `ppo`: clipped surrogate; the others are in docs/algorithms.md."""
    ratio_type: Annotated[
        Literal["token", "turn", "sequence", "sequence-token", "sequence-product"], OnlyWith(pg_variant=WITH_RATIO)
    ] = "token"
    """Over what the ratio to the old policy is taken. `turn`, `sequence` (GSPO): geometric mean over its sampled tokens;
    `sequence-token`: GSPO-token; `sequence-product`: the sequence's whole ratio. A sequence is one continuous context."""
    pg_clip: Annotated[float, OnlyWith(pg_variant=("ppo",))] = Field(default=0.2, gt=0)
    pg_clip_low: Annotated[float | None, OnlyWith(pg_variant=("ppo",))] = Field(default=None, gt=0)
    """Lower clip bound 1 - pg_clip_low; None takes `pg_clip`."""
    pg_clip_high: Annotated[float | None, OnlyWith(pg_variant=("ppo",))] = Field(default=None, gt=0)
    """Upper clip bound 1 + pg_clip_high; None takes `pg_clip`."""
    dual_clip: Annotated[float | None, OnlyWith(pg_variant=("ppo",))] = Field(default=None, gt=1)
    """Bound c of the dual clip for negative advantages (arXiv:1912.09729)."""
    tis_lower_bound: Annotated[float, OnlyWith(pg_variant=("tis",))] = Field(default=0.0, ge=0)
    tis_upper_bound: Annotated[float, OnlyWith(pg_variant=("tis",))] = Field(default=2.0, gt=0)
    cispo_epsilon_low: Annotated[float, OnlyWith(pg_variant=("cispo",))] = Field(default=1.0, gt=0)
    """The weight is at least 1 - this; 1 is no lower bound."""
    cispo_epsilon_high: Annotated[float, OnlyWith(pg_variant=("cispo",))] = Field(default=4.0, gt=0)
    """The weight is at most 1 + this."""
    cispo_use_unified_mask: Annotated[bool, OnlyWith(pg_variant=("cispo",))] = False
    """Drop the tokens whose gradient PPO's clip would take away."""
    topr_positive_weight: Annotated[float, OnlyWith(pg_variant=("topr",))] = Field(default=1.0, ge=0)
    topr_negative_weight: Annotated[float, OnlyWith(pg_variant=("topr",))] = Field(default=1.0, ge=0)
    kimi15_tau: Annotated[float, OnlyWith(pg_variant=("kimi15",))] = Field(default=0.1, ge=0)
    aipo_rho: Annotated[float, OnlyWith(pg_variant=("aipo",))] = Field(default=4.0, gt=0)
    """Upper bound of the weight; 2 to 10 in the paper."""
    dppo_mask_low: Annotated[float, OnlyWith(pg_variant=("dppo_tv",))] = Field(default=0.2, gt=0, le=1)
    """Fall in a token's probability beyond which a negative advantage does not push it further."""
    dppo_mask_high: Annotated[float, OnlyWith(pg_variant=("dppo_tv",))] = Field(default=0.2, gt=0, le=1)
    """Rise beyond which a positive advantage does not."""
    dppo_kl_tau: Annotated[float, OnlyWith(pg_variant=("dppo_tv",))] = Field(default=1e-3, ge=0)
    sapo_temperature_pos: Annotated[float, OnlyWith(pg_variant=("sapo",))] = Field(default=1.0, gt=0)
    sapo_temperature_neg: Annotated[float, OnlyWith(pg_variant=("sapo",))] = Field(default=1.05, gt=0)

    # --- Off-policy
    old_logprobs: Annotated[
        Literal["behavior", "recompute", "loglinear"],
        NotWith("its ratio is to what sampled; leave this out", pg_variant=AGAINST_BEHAVIOR),
    ] = "behavior"
    """What the ratio's denominator is: the engine's logprobs; the learner's own at the start of the step; or AReaL's
    log-linear guess of these from each token's version, which needs no forward pass."""
    train_infer_correction: TrainInferCorrection = TrainInferCorrection()

    # --- Aggregation and regularisation
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """A sequence is a trajectory; one that is cut into segments counts once. `seq-mean-token-sum-norm` divides the sum by
    `loss_agg_length`."""
    loss_agg_length: Annotated[int | None, OnlyWith(loss_agg_mode=("seq-mean-token-sum-norm",))] = Field(
        default=None, ge=1
    )
    """None takes `sequence_length`."""
    entropy_loss_coef: float = Field(default=0.0, ge=0)
    entropy_loss_scheduler_type: Annotated[Scheduler, OnlyWith(entropy_loss_coef=SET)] = "constant"
    """`linear` and `cosine` let the bonus fall to zero at the last step: explore first, settle later."""
    ppo_epochs: int = Field(default=1, ge=1)
    use_kl_loss: bool = False
    kl_loss_coef: Annotated[float, OnlyWith(use_kl_loss=(True,))] = Field(default=0.0, ge=0)
    kl_loss_type: Annotated[Literal["k2", "k3", "abs", "full"], OnlyWith(use_kl_loss=(True,))] = "k3"
    """Estimator of the KL in the loss; `full` is no estimate, it sums over the whole vocabulary. k1 is not offered: its
    gradient has mean zero."""
    add_token_level_kl: Annotated[bool, NotWith("take use_kl_loss", adv_estimator=(*TURN_WISE, *DISTILLING))] = False
    """Subtract `init_kl_coef` times the KL to the reference from each token's reward."""
    init_kl_coef: Annotated[float, OnlyWith(add_token_level_kl=(True,))] = Field(default=0.0, ge=0)
    target_kl: Annotated[float | None, OnlyWith(add_token_level_kl=(True,))] = Field(default=None, gt=0)
    """Adapts the coefficient towards this KL per token (arXiv:1909.08593); None keeps it fixed."""
    kl_horizon: Annotated[int, OnlyWith(target_kl=SET)] = Field(default=10_000, ge=1)
    kl_penalty: Annotated[Literal["kl", "k2", "k3", "abs", "full"], OnlyWith(add_token_level_kl=(True,))] = "kl"
    """Estimator of the KL in the reward; `full` is no estimate, it sums over the whole vocabulary and needs
    `old_logprobs: recompute`."""
    ref_model_sync_steps: int | None = Field(default=None, ge=1)
    """Optimizer batches after which the reference moves to the policy, again and again; None keeps it at the start."""
    ref_model_mixup_alpha: Annotated[float, OnlyWith(ref_model_sync_steps=SET)] = Field(default=1.0, gt=0, le=1)
    """The share of the way that it moves (TR-DPO, arXiv:2404.09656)."""
    value_clip: Annotated[float | None, OnlyWith(adv_estimator=("gae",))] = Field(default=None, gt=0)
    critic_warmup: Annotated[int, OnlyWith(adv_estimator=("gae",))] = Field(default=0, ge=0)
    """Steps that train the critic alone."""

    @field_validator("reward_normalization")
    @classmethod
    def _suits_the_estimator(cls, value: RewardNormalization, info: ValidationInfo) -> RewardNormalization:
        estimator = info.data.get("adv_estimator")
        split = value.norm_mean_type or value.norm_std_type
        if estimator in DISTILLING and value != RewardNormalization():
            raise ValueError(f"has no effect with adv_estimator={estimator}: {NO_REWARD}")
        if estimator in BASELINES and (value.method not in (None, "identity") or split):
            raise ValueError(f"adv_estimator {estimator} compares rewards its own way: set method=null, without norm_*")
        if estimator in COMPARING and value.method == "identity":
            raise ValueError(
                f"adv_estimator {estimator} compares rewards: take method mean or mean_std, or adv_estimator reinforce"
            )
        if estimator == "dr_grpo" and (value.method == "mean_std" or value.norm_std_type):
            raise ValueError("adv_estimator dr_grpo divides by no deviation: leave it out, or take adv_estimator grpo")
        if estimator == "gigpo" and (value.grouping != "traj_group_id" or split):
            raise ValueError(
                "adv_estimator gigpo compares within groups and within anchor states: of this table it takes method alone"
            )
        if value.grouping == "state" and estimator != "step_reinforce":
            raise ValueError("grouping state compares turns: take adv_estimator step_reinforce, or gigpo, which has it")
        if estimator == "step_reinforce" and split:
            raise ValueError("adv_estimator step_reinforce normalises turns: take grouping and method")
        if value.grouping != "traj_group_id" and not _looks_at_grouping(value, str(estimator)):
            raise ValueError(
                f"grouping {value.grouping} has no effect: adv_estimator {estimator} compares nothing within it here; leave "
                "it out, or take a method or norm_* (group) with an estimator that has no way of its own"
            )
        return value

    @field_validator("train_infer_correction")
    @classmethod
    def _has_two_policies(cls, value: TrainInferCorrection, info: ValidationInfo) -> TrainInferCorrection:
        old, variant = info.data.get("old_logprobs"), info.data.get("pg_variant")
        if value.is_weight is not None and old == "behavior":
            raise ValueError(
                "is_weight corrects the learner's logprobs at the start of the step: set old_logprobs=recompute or "
                "loglinear, or leave it out (the ratio is to what sampled already)"
            )
        if value.is_weight is not None and variant in AGAINST_BEHAVIOR:
            raise ValueError(f"pg_variant {variant} has its ratio to what sampled already: leave is_weight out")
        if value.m2_threshold is not None and old != "recompute":
            raise ValueError("m2_threshold compares the step's start with what sampled: set old_logprobs=recompute")
        return value

    @property
    def reward_method(self) -> RewardMethod:
        """How rewards are normalised, with the estimator's own way filled in."""
        told = self.reward_normalization
        if told.norm_mean_type or told.norm_std_type:
            both = "mean_std" if told.norm_std_type else "mean"
            return both if told.norm_mean_type else "std"
        return told.method or COMPARING.get(self.adv_estimator, "identity")

    @property
    def mean_over(self) -> Over | None:
        """Where the mean that is subtracted from an episode's reward comes from."""
        told = self.reward_normalization
        if told.norm_mean_type or told.norm_std_type:
            return told.norm_mean_type
        return "group" if self.reward_method in ("mean", "mean_std") else None

    @property
    def std_over(self) -> Over | None:
        """Where the deviation that it is divided by comes from."""
        told = self.reward_normalization
        if told.norm_mean_type or told.norm_std_type:
            return told.norm_std_type
        return "group" if self.reward_method == "mean_std" else None

    @property
    def num_baselines(self) -> int:
        """Greedy episodes that are played beside each group."""
        return 1 if self.adv_estimator in GREEDY_BASELINE else 0

    @property
    def compares_siblings(self) -> bool:
        """Whether a group whose members all did equally well says nothing."""
        if self.use_opd:
            return False
        of_group = self.mean_over == "group" and self.reward_normalization.grouping in ("traj_group_id", "state")
        return self.adv_estimator in BASELINES or of_group

    @property
    def whitens_advantages(self) -> bool:
        """`whiten_advantages`, with the estimator's own way filled in."""
        own = self.adv_estimator in WHITENING
        return own if self.whiten_advantages is None else self.whiten_advantages

    @property
    def distills(self) -> bool:
        return self.use_opd or self.adv_estimator in DISTILLING

    @property
    def needs_reference(self) -> bool:
        return (self.use_kl_loss and self.kl_loss_coef > 0) or (self.add_token_level_kl and self.init_kl_coef > 0)

    @property
    def needs_ref_logprobs(self) -> bool:
        """Whether what the reference says of single tokens counts, not only its distributions."""
        in_loss = self.use_kl_loss and self.kl_loss_type != "full"
        return self.needs_reference and (in_loss or (self.add_token_level_kl and self.kl_penalty != "full"))

    @property
    def full_kls(self) -> tuple[str, ...]:
        """Keys that ask for a KL over the whole vocabulary."""
        asked = {"kl_loss_type": self.kl_in_loss_is_full, "kl_penalty": self.kl_in_reward_is_full}
        return tuple(key for key, is_full in asked.items() if is_full)

    @property
    def kl_in_reward_is_full(self) -> bool:
        return self.add_token_level_kl and self.init_kl_coef > 0 and self.kl_penalty == "full"

    @property
    def kl_in_loss_is_full(self) -> bool:
        return self.use_kl_loss and self.kl_loss_coef > 0 and self.kl_loss_type == "full"


def _looks_at_grouping(told: RewardNormalization, estimator: str) -> bool:
    """Whether rewards are compared among those of a grouping."""
    if told.norm_mean_type or told.norm_std_type:
        return "group" in (told.norm_mean_type, told.norm_std_type)
    method = told.method or COMPARING.get(estimator, "identity")
    return estimator not in BASELINES and method != "identity"
