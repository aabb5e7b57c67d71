"""Keys of the algorithm: advantages, group selection, loss, off-policy corrections, regularization.

The keys are at the root of a run's YAML, under ROLL's names where ROLL has them. docs/algorithms.md has formulas and papers.
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

GROUP_METHODS: dict[str, RewardMethod] = {
    "grpo": "mean_std",
    "gigpo": "mean_std",
    "dr_grpo": "mean",
    "reinforce_plus_plus_baseline": "mean",
}
"""Estimators that normalize rewards within a group, with their default method."""
BASELINES = ("rloo", "opo", "maxrl", "remax")
"""Estimators with a baseline of their own, instead of a normalization method."""
GREEDY_BASELINE = ("remax",)
"""Estimators whose baseline is a greedy episode of the same task."""
NEEDS_GROUPS = (*GROUP_METHODS, *(name for name in BASELINES if name not in GREEDY_BASELINE))
TURN_WISE = ("gigpo", "step_reinforce")
"""Estimators with one advantage per turn, without rewards per token."""
WHITENING = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
DISTILLING = ("opd",)
"""Estimators that learn from teachers and ignore rewards."""
NO_REWARD = "opd learns from teachers alone: leave it out, or take another adv_estimator with use_opd=true"
WITH_RATIO = ("ppo", "tis", "cispo", "topr", "sapo")
"""Losses that support a ratio per turn or sequence."""
AGAINST_BEHAVIOR = ("aipo", "dppo_tv")
"""Losses whose ratio is always to the behavior policy."""


class AlgorithmConfig(ConditionalConfig):
    """Estimator, loss and regularization."""

    sequence_length: int = Field(default=512, ge=2)
    """Maximum length of a trajectory, in tokens: prompt, answers and observations."""

    # --- From rewards to advantages
    adv_estimator: Estimator = "grpo"
    """Advantage estimator. `gae` trains a critic; `grpo`, `dr_grpo`, `rloo`, `opo`, `maxrl`, `gigpo` and
    `reinforce_plus_plus_baseline` compare the members of a group; `remax` compares with an additional greedy episode per
    group; `step_reinforce` and `gigpo` have one advantage per turn; `opd` learns from teachers."""
    use_opd: Annotated[bool, NotWith("opd distills already", adv_estimator=DISTILLING)] = False
    """On-policy distillation in addition to rewards: the KL to the teachers is subtracted from each token's advantage.
    To learn from teachers alone (ROLL's `is_pure_opd`), use `adv_estimator: opd`."""
    teacher: dict[str, TeacherConfig] = Field(default_factory=dict[str, TeacherConfig])
    """Teachers by a name of your choice. The KLs of all teachers of a tag are added."""
    reward_normalization: RewardNormalization = RewardNormalization()
    reward_shaping: Annotated[RewardShaping, NotWith(NO_REWARD, adv_estimator=DISTILLING)] = RewardShaping()
    gae_level: Annotated[Literal["token", "turn"], OnlyWith(adv_estimator=("gae",))] = "token"
    """Unit of an action: a token, or a turn, whose value is that of the state before its first token."""
    value_targets: Annotated[Literal["gae", "vtrace"], OnlyWith(adv_estimator=("gae",), gae_level=("token",))] = "gae"
    """Regression target of the critic: GAE returns, or V-trace, which corrects them for off-policy data and needs
    `old_logprobs: recompute`."""
    vtrace_rho_bar: Annotated[float, OnlyWith(value_targets=("vtrace",))] = Field(default=1.0, gt=0)
    """Upper bound of V-trace's importance weight rho."""
    vtrace_c_bar: Annotated[float, OnlyWith(value_targets=("vtrace",))] = Field(default=1.0, gt=0)
    """Upper bound of V-trace's trace coefficient c."""
    gamma: Annotated[
        float,
        NotWith("take step_reward_gamma", adv_estimator=TURN_WISE),
        NotWith(NO_REWARD, adv_estimator=DISTILLING),
    ] = Field(default=1.0, ge=0, le=1)
    """Discount per sampled token; per turn with `agentic_reinforce` and `gae_level: turn`. Observation tokens are not
    counted."""
    lambd: Annotated[float, OnlyWith(adv_estimator=("gae",))] = Field(default=0.95, ge=0, le=1)
    """GAE's lambda."""
    step_reward_gamma: Annotated[float, OnlyWith(adv_estimator=TURN_WISE)] = Field(default=0.95, ge=0, le=1)
    """Discount per turn."""
    episode_reward_weight: Annotated[float, OnlyWith(adv_estimator=("gigpo",))] = Field(default=1.0, ge=0)
    """Weight of the advantage among a group's episodes."""
    step_reward_weight: Annotated[float, OnlyWith(adv_estimator=("gigpo",))] = Field(default=1.0, ge=0)
    """Weight of the advantage among turns with the same observation."""
    reward_clip: Annotated[float | None, NotWith("take advantage_clip", adv_estimator=(*TURN_WISE, *DISTILLING))] = (
        Field(default=None, gt=0)
    )
    """Bound on a reward's absolute value, after normalization and before the KL penalty."""
    whiten_rewards: Annotated[bool, NotWith("take whiten_advantages", adv_estimator=(*TURN_WISE, *DISTILLING))] = False
    """Division of token rewards, including the KL penalty, by their standard deviation over the batch."""
    whiten_advantages: bool | None = None
    """Normalization of advantages to zero mean and unit deviation over the batch's tokens. None is the estimator's default:
    true for `reinforce_plus_plus` and `reinforce_plus_plus_baseline`, false otherwise."""
    advantage_clip: float | None = Field(default=None, gt=0)
    """Bound on an advantage's absolute value."""

    # --- Selection of groups and episodes
    zero_variance: Literal["mask", "refill", "train"] = "mask"
    """Handling of groups without signal: those whose members all have the same reward under an estimator that compares them,
    and those that a filter below rejects. `mask` skips the computation but counts the group in the policy loss's
    denominators; `refill` drops it and takes another (DAPO's dynamic sampling); `train` trains on it as on any other."""
    group_filter_cls: Annotated[str | None, OnlyWith(zero_variance=("mask", "refill"))] = None
    """`module:Class`, constructed without arguments. Its instances are called with a `Group` and return True to train
    on it."""
    difficulty_mask: Annotated[bool, OnlyWith(zero_variance=("mask", "refill"))] = False
    """Training only on groups whose mean reward is strictly between the two thresholds."""
    difficulty_low_threshold: Annotated[float, OnlyWith(difficulty_mask=(True,))] = 0.0
    difficulty_high_threshold: Annotated[float, OnlyWith(difficulty_mask=(True,))] = 1.0
    variance_filter_ratio: float = Field(default=1.0, gt=0, le=1)
    """Fraction of a step's groups to train on, those with the highest reward deviation (StarPO-S)."""
    max_len_mask: bool = False
    """Masking of episodes that were truncated at `sequence_length`."""
    error_max_len_clip: bool = False
    """Masking of episodes without a positive reward and with more than `error_max_len_threshold` sampled tokens."""
    error_max_len_threshold: Annotated[int, OnlyWith(error_max_len_clip=(True,))] = Field(default=1024, ge=1)
    difficulty_loss_weight: bool = False
    """Weighting of each episode's policy loss by 0.5 + 1.5 (1 - mean reward of its group, clamped to [0, 1])."""
    length_loss_weight: bool = False
    """Weighting of each episode's policy loss by 1.5 - its sampled tokens / the batch's maximum."""

    # --- Policy loss
    pg_variant: Literal["ppo", "vanilla", "tis", "cispo", "topr", "kimi15", "aipo", "dppo_tv", "sapo", "gpg"] = "ppo"
    """Policy loss per token. `ppo` is the clipped surrogate; docs/algorithms.md describes the others."""
    ratio_type: Annotated[
        Literal["token", "turn", "sequence", "sequence-token", "sequence-product"], OnlyWith(pg_variant=WITH_RATIO)
    ] = "token"
    """Unit of the ratio to the old policy. `turn` and `sequence` (GSPO): geometric mean over sampled tokens;
    `sequence-token`: GSPO-token; `sequence-product`: product over the sequence. A sequence is one continuous context."""
    pg_clip: Annotated[float, OnlyWith(pg_variant=("ppo",))] = Field(default=0.2, gt=0)
    """Clip range of the ratio, [1 - pg_clip, 1 + pg_clip]."""
    pg_clip_low: Annotated[float | None, OnlyWith(pg_variant=("ppo",))] = Field(default=None, gt=0)
    """Lower clip bound is 1 - pg_clip_low; None is `pg_clip`."""
    pg_clip_high: Annotated[float | None, OnlyWith(pg_variant=("ppo",))] = Field(default=None, gt=0)
    """Upper clip bound is 1 + pg_clip_high; None is `pg_clip`."""
    dual_clip: Annotated[float | None, OnlyWith(pg_variant=("ppo",))] = Field(default=None, gt=1)
    """Bound c of the dual clip for negative advantages (arXiv:1912.09729)."""
    tis_lower_bound: Annotated[float, OnlyWith(pg_variant=("tis",))] = Field(default=0.0, ge=0)
    """Lower bound of the importance weight."""
    tis_upper_bound: Annotated[float, OnlyWith(pg_variant=("tis",))] = Field(default=2.0, gt=0)
    """Upper bound of the importance weight."""
    cispo_epsilon_low: Annotated[float, OnlyWith(pg_variant=("cispo",))] = Field(default=1.0, gt=0)
    """Lower bound of the weight is 1 - cispo_epsilon_low; 1 means none."""
    cispo_epsilon_high: Annotated[float, OnlyWith(pg_variant=("cispo",))] = Field(default=4.0, gt=0)
    """Upper bound of the weight is 1 + cispo_epsilon_high."""
    cispo_use_unified_mask: Annotated[bool, OnlyWith(pg_variant=("cispo",))] = False
    """Masking of tokens whose gradient PPO's clip would zero."""
    topr_positive_weight: Annotated[float, OnlyWith(pg_variant=("topr",))] = Field(default=1.0, ge=0)
    """Loss weight of tokens with a positive advantage."""
    topr_negative_weight: Annotated[float, OnlyWith(pg_variant=("topr",))] = Field(default=1.0, ge=0)
    """Loss weight of tokens with a negative advantage."""
    kimi15_tau: Annotated[float, OnlyWith(pg_variant=("kimi15",))] = Field(default=0.1, ge=0)
    aipo_rho: Annotated[float, OnlyWith(pg_variant=("aipo",))] = Field(default=4.0, gt=0)
    """Upper bound of the importance weight; 2 to 10 in the paper."""
    dppo_mask_low: Annotated[float, OnlyWith(pg_variant=("dppo_tv",))] = Field(default=0.2, gt=0, le=1)
    """Decrease of a token's probability beyond which a negative advantage is masked."""
    dppo_mask_high: Annotated[float, OnlyWith(pg_variant=("dppo_tv",))] = Field(default=0.2, gt=0, le=1)
    """Increase of a token's probability beyond which a positive advantage is masked."""
    dppo_kl_tau: Annotated[float, OnlyWith(pg_variant=("dppo_tv",))] = Field(default=1e-3, ge=0)
    sapo_temperature_pos: Annotated[float, OnlyWith(pg_variant=("sapo",))] = Field(default=1.0, gt=0)
    sapo_temperature_neg: Annotated[float, OnlyWith(pg_variant=("sapo",))] = Field(default=1.05, gt=0)

    # --- Off-policy
    old_logprobs: Annotated[
        Literal["behavior", "recompute", "loglinear"],
        NotWith("its ratio is to the behavior policy; leave this out", pg_variant=AGAINST_BEHAVIOR),
    ] = "behavior"
    """Denominator of the ratio: `behavior`, the engine's logprobs; `recompute`, the learner's at the start of the step;
    `loglinear`, AReaL's log-linear approximation of these from each token's version, without a forward pass."""
    train_infer_correction: TrainInferCorrection = TrainInferCorrection()

    # --- Aggregation and regularization
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """Reduction of token losses. A sequence is a trajectory, even if it has several segments. `seq-mean-token-sum-norm`
    divides the sum by `loss_agg_length`."""
    loss_agg_length: Annotated[int | None, OnlyWith(loss_agg_mode=("seq-mean-token-sum-norm",))] = Field(
        default=None, ge=1
    )
    """Constant divisor, in tokens; None is `sequence_length`."""
    entropy_loss_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""
    entropy_loss_scheduler_type: Annotated[Scheduler, OnlyWith(entropy_loss_coef=SET)] = "constant"
    """Schedule of the entropy bonus; `linear` and `cosine` decay it to zero at the last step."""
    ppo_epochs: int = Field(default=1, ge=1)
    """Passes over each batch."""
    use_kl_loss: bool = False
    """Addition of `kl_loss_coef` times the KL to the reference to the loss."""
    kl_loss_coef: Annotated[float, OnlyWith(use_kl_loss=(True,))] = Field(default=0.0, ge=0)
    kl_loss_type: Annotated[Literal["k2", "k3", "abs", "full"], OnlyWith(use_kl_loss=(True,))] = "k3"
    """Estimator of the KL in the loss; `full` is exact, a sum over the vocabulary. k1 is not available: its gradient
    has mean zero."""
    add_token_level_kl: Annotated[bool, NotWith("take use_kl_loss", adv_estimator=(*TURN_WISE, *DISTILLING))] = False
    """Subtraction of `init_kl_coef` times the KL to the reference from each token's reward."""
    init_kl_coef: Annotated[float, OnlyWith(add_token_level_kl=(True,))] = Field(default=0.0, ge=0)
    """Coefficient of the KL in the reward; with `target_kl` its initial value."""
    target_kl: Annotated[float | None, OnlyWith(add_token_level_kl=(True,))] = Field(default=None, gt=0)
    """KL per token, in nats, that the coefficient is adapted towards (arXiv:1909.08593); None keeps the coefficient
    fixed."""
    kl_horizon: Annotated[int, OnlyWith(target_kl=SET)] = Field(default=10_000, ge=1)
    """Time constant of the adaptation, in trajectories."""
    kl_penalty: Annotated[Literal["kl", "k2", "k3", "abs", "full"], OnlyWith(add_token_level_kl=(True,))] = "kl"
    """Estimator of the KL in the reward; `full` is exact, a sum over the vocabulary, and needs `old_logprobs: recompute`."""
    ref_model_sync_steps: int | None = Field(default=None, ge=1)
    """Period of reference updates, in steps; None keeps the initial reference."""
    ref_model_mixup_alpha: Annotated[float, OnlyWith(ref_model_sync_steps=SET)] = Field(default=1.0, gt=0, le=1)
    """Weight of the policy in the updated reference (TR-DPO, arXiv:2404.09656); 1 copies the policy."""
    value_clip: Annotated[float | None, OnlyWith(adv_estimator=("gae",))] = Field(default=None, gt=0)
    """Clip range of a value around its prediction before the step."""
    critic_warmup: Annotated[int, OnlyWith(adv_estimator=("gae",))] = Field(default=0, ge=0)
    """Initial steps that train the critic alone."""

    @field_validator("reward_normalization")
    @classmethod
    def _fits_estimator(cls, value: RewardNormalization, info: ValidationInfo) -> RewardNormalization:
        estimator = info.data.get("adv_estimator")
        split = value.norm_mean_type or value.norm_std_type
        if estimator in DISTILLING and value != RewardNormalization():
            raise ValueError(f"has no effect with adv_estimator={estimator}: {NO_REWARD}")
        if estimator in BASELINES and (value.method not in (None, "identity") or split):
            raise ValueError(f"adv_estimator {estimator} has a baseline of its own: set method=null, without norm_*")
        if estimator in GROUP_METHODS and value.method == "identity":
            raise ValueError(
                f"adv_estimator {estimator} normalizes rewards: take method mean or mean_std, or adv_estimator reinforce"
            )
        if estimator == "dr_grpo" and (value.method == "mean_std" or value.norm_std_type):
            raise ValueError(
                "adv_estimator dr_grpo does not divide by the deviation: leave it out, or take adv_estimator grpo"
            )
        if estimator == "gigpo" and (value.grouping != "traj_group_id" or split):
            raise ValueError(
                "adv_estimator gigpo compares within groups and within equal observations: only method has an effect"
            )
        if value.grouping == "state" and estimator != "step_reinforce":
            raise ValueError(
                "grouping state compares turns: take adv_estimator step_reinforce, or gigpo, which includes it"
            )
        if estimator == "step_reinforce" and split:
            raise ValueError("adv_estimator step_reinforce normalizes turns: take grouping and method")
        if value.grouping != "traj_group_id" and not _uses_grouping(value, str(estimator)):
            raise ValueError(
                f"grouping {value.grouping} has no effect with adv_estimator {estimator} and this normalization: leave it "
                "out, or set method, or a norm_* to group, with an estimator without a baseline of its own"
            )
        return value

    @field_validator("train_infer_correction")
    @classmethod
    def _fits_loss(cls, value: TrainInferCorrection, info: ValidationInfo) -> TrainInferCorrection:
        old, variant = info.data.get("old_logprobs"), info.data.get("pg_variant")
        if value.is_weight is not None and old == "behavior":
            raise ValueError(
                "is_weight corrects the learner's logprobs at the start of the step: set old_logprobs=recompute or "
                "loglinear, or leave it out (the ratio is to the behavior policy already)"
            )
        if value.is_weight is not None and variant in AGAINST_BEHAVIOR:
            raise ValueError(f"pg_variant {variant} has its ratio to the behavior policy already: leave is_weight out")
        if value.m2_threshold is not None and old != "recompute":
            raise ValueError(
                "m2_threshold needs the policy's logprobs at the start of the step: set old_logprobs=recompute"
            )
        return value

    @property
    def reward_method(self) -> RewardMethod:
        """Reward normalization, with the estimator's default filled in."""
        config = self.reward_normalization
        if config.norm_mean_type or config.norm_std_type:
            both = "mean_std" if config.norm_std_type else "mean"
            return both if config.norm_mean_type else "std"
        return config.method or GROUP_METHODS.get(self.adv_estimator, "identity")

    @property
    def mean_over(self) -> Over | None:
        """Scope of the mean that is subtracted from an episode's reward."""
        config = self.reward_normalization
        if config.norm_mean_type or config.norm_std_type:
            return config.norm_mean_type
        return "group" if self.reward_method in ("mean", "mean_std") else None

    @property
    def std_over(self) -> Over | None:
        """Scope of the deviation that an episode's reward is divided by."""
        config = self.reward_normalization
        if config.norm_mean_type or config.norm_std_type:
            return config.norm_std_type
        return "group" if self.reward_method == "mean_std" else None

    @property
    def num_baselines(self) -> int:
        """Greedy episodes per group."""
        return 1 if self.adv_estimator in GREEDY_BASELINE else 0

    @property
    def compares_siblings(self) -> bool:
        """True if a group carries no signal when its members' rewards are equal."""
        if self.use_opd:
            return False
        centers_group = self.mean_over == "group" and self.reward_normalization.grouping in ("traj_group_id", "state")
        return self.adv_estimator in BASELINES or centers_group

    @property
    def whitens_advantages(self) -> bool:
        """`whiten_advantages`, with the estimator's default filled in."""
        default = self.adv_estimator in WHITENING
        return default if self.whiten_advantages is None else self.whiten_advantages

    @property
    def distills(self) -> bool:
        return self.use_opd or self.adv_estimator in DISTILLING

    @property
    def needs_reference(self) -> bool:
        return (self.use_kl_loss and self.kl_loss_coef > 0) or (self.add_token_level_kl and self.init_kl_coef > 0)

    @property
    def needs_ref_logprobs(self) -> bool:
        """True if the reference's logprobs of sampled tokens are needed, not only its distributions."""
        in_loss = self.use_kl_loss and self.kl_loss_type != "full"
        return self.needs_reference and (in_loss or (self.add_token_level_kl and self.kl_penalty != "full"))

    @property
    def full_kls(self) -> tuple[str, ...]:
        """Keys that request a KL over the vocabulary."""
        requested = {"kl_loss_type": self.kl_in_loss_is_full, "kl_penalty": self.kl_in_reward_is_full}
        return tuple(key for key, is_full in requested.items() if is_full)

    @property
    def kl_in_reward_is_full(self) -> bool:
        return self.add_token_level_kl and self.init_kl_coef > 0 and self.kl_penalty == "full"

    @property
    def kl_in_loss_is_full(self) -> bool:
        return self.use_kl_loss and self.kl_loss_coef > 0 and self.kl_loss_type == "full"


def _uses_grouping(config: RewardNormalization, estimator: str) -> bool:
    """Return True if rewards are compared within the grouping."""
    if config.norm_mean_type or config.norm_std_type:
        return "group" in (config.norm_mean_type, config.norm_std_type)
    method = config.method or GROUP_METHODS.get(estimator, "identity")
    return estimator not in BASELINES and method != "identity"
