"""Keys of the algorithm; formulas in docs/algorithms.md."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from offbeat.trainer.config.conditions import (
    SET,
    ConditionalConfig,
    NotWith,
    OnlyWith,
)
from offbeat.trainer.config.corrections import TrainInferCorrection
from offbeat.trainer.config.estimators import (
    AGAINST_BEHAVIOR,
    BASELINES,
    DECOUPLED,
    DISTILLING,
    GREEDY_BASELINE,
    GROUP_METHODS,
    TURN_WISE,
    WHITENING,
    WITH_RATIO,
    Estimator,
    RewardMethod,
)
from offbeat.trainer.config.query_filter import QueryFilter
from offbeat.trainer.config.rewards import Over, RewardNormalization, RewardShaping
from offbeat.trainer.config.roles import TeacherConfig
from offbeat.trainer.config.schedule import Scheduler
from offbeat.trainer.config.user_function import UserFunction

NO_REWARD = "opd learns from teachers alone: leave it out, or take another adv_estimator with use_opd=true"
NO_TOKEN_REWARD = NotWith("take use_kl_loss", adv_estimator=(*TURN_WISE, *DISTILLING))
DEFAULT_KL_COEF = 0.2
"""ROLL's and TRL's."""


class AlgorithmConfig(ConditionalConfig):
    """Estimator, loss and regularization."""

    sequence_length: int = Field(default=512, ge=2)
    """Maximum tokens of a trajectory, including observations."""

    # --- From rewards to advantages
    adv_estimator: Estimator | UserFunction = "grpo"
    """Advantage estimator. `grpo`, `dr_grpo`, `rloo`, `opo`, `maxrl`, `gigpo`, `reinforce_plus_plus_baseline`: compare
    a group; `gdpo`: each reward function's values on their own; `remax`: a greedy episode per group; `gae`: a critic;
    `step_reinforce`, `gigpo`: per turn; `opd`: teachers alone; `module:function`: your own.
    """
    use_opd: Annotated[bool, NotWith("opd distills already", adv_estimator=DISTILLING)] = False
    """Subtraction of the teachers' KL from advantages; `adv_estimator: opd` ignores rewards (ROLL's `is_pure_opd`)."""
    teacher: dict[str, TeacherConfig] = Field(default_factory=dict[str, TeacherConfig])
    """Teachers by name; KLs of a tag's teachers are added."""
    reward_normalization: RewardNormalization = RewardNormalization()
    reward_shaping: Annotated[RewardShaping, NotWith(NO_REWARD, adv_estimator=DISTILLING)] = RewardShaping()
    gae_level: Annotated[Literal["token", "turn"], OnlyWith(adv_estimator=("gae",))] = "token"
    """Unit of an action; a turn's value is that before its first token."""
    value_targets: Annotated[Literal["gae", "vtrace"], OnlyWith(adv_estimator=("gae",), gae_level=("token",))] = "gae"
    """Critic's regression target: GAE returns, or V-trace for off-policy data (needs `old_logprobs: recompute`)."""
    vtrace_rho_bar: Annotated[float, OnlyWith(value_targets=("vtrace",))] = Field(default=1.0, gt=0)
    """Upper bound of V-trace's weight rho."""
    vtrace_c_bar: Annotated[float, OnlyWith(value_targets=("vtrace",))] = Field(default=1.0, gt=0)
    """Upper bound of V-trace's coefficient c."""
    gamma: Annotated[
        float,
        NotWith("take step_reward_gamma", adv_estimator=TURN_WISE),
        NotWith(NO_REWARD, adv_estimator=DISTILLING),
    ] = Field(default=1.0, ge=0, le=1)
    """Discount per sampled token; per turn with `agentic_reinforce` or `gae_level: turn`."""
    lambd: Annotated[float, OnlyWith(adv_estimator=("gae",))] = Field(default=0.95, ge=0, le=1)
    """GAE's lambda."""
    bootstrap_truncated: Annotated[bool, OnlyWith(adv_estimator=("gae",))] = False
    """Bootstrapping of episodes that a limit cut (tokens, `max_steps`, the env's time limit) with the value after their
    last token (arXiv:1712.00378); false treats the limit as an end, as in ROLL, verl and TRL.
    """
    step_reward_gamma: Annotated[float, OnlyWith(adv_estimator=TURN_WISE)] = Field(default=0.95, ge=0, le=1)
    """Discount per turn."""
    episode_reward_weight: Annotated[float, OnlyWith(adv_estimator=("gigpo",))] = Field(default=1.0, ge=0)
    """Weight of the advantage among a group's episodes."""
    step_reward_weight: Annotated[float, OnlyWith(adv_estimator=("gigpo",))] = Field(default=1.0, ge=0)
    """Weight of the advantage among equal observations."""
    reward_clip: Annotated[float | None, NotWith("take advantage_clip", adv_estimator=(*TURN_WISE, *DISTILLING))] = (
        Field(default=None, gt=0)
    )
    """Bound on absolute normalized rewards, before the KL penalty."""
    whiten_rewards: Annotated[bool, NotWith("take whiten_advantages", adv_estimator=(*TURN_WISE, *DISTILLING))] = False
    """Division of token rewards, with KL, by the batch's deviation."""
    whiten_advantages: bool | None = None
    """Normalization over the batch's tokens to mean 0, deviation 1. None: true for `reinforce_plus_plus` and
    `reinforce_plus_plus_baseline`, else false.
    """
    whiten_over: Literal["batch", "tags"] = "batch"
    """Scope of `whiten_rewards` and `whiten_advantages`: the batch, or each tag by itself, as ROLL does by domain."""
    advantage_clip: float | None = Field(default=None, gt=0)
    """Bound on absolute advantages."""

    # --- Selection of groups and episodes
    zero_variance: Literal["mask", "refill", "train"] = "mask"
    """Handling of groups that a filter rejects, or with equal rewards if compared. `mask`: skipped, but counted in the
    policy loss's denominators; `refill`: replaced (DAPO's dynamic sampling); `train`: trained on.
    """
    max_refill_ratio: Annotated[float, OnlyWith(zero_variance=("refill",))] = Field(default=20.0, gt=0)
    """Maximum refilled groups of a step, in groups per step; further ones are masked."""
    group_filter_cls: Annotated[str | None, OnlyWith(zero_variance=("mask", "refill"))] = None
    """`module:function`, or `module:Class`, constructed without arguments: called with a `Group`, returns whether to
    train."""
    difficulty_mask: Annotated[bool, OnlyWith(zero_variance=("mask", "refill"))] = False
    """Training only on mean rewards strictly between the thresholds."""
    difficulty_low_threshold: Annotated[float, OnlyWith(difficulty_mask=(True,))] = 0.0
    difficulty_high_threshold: Annotated[float, OnlyWith(difficulty_mask=(True,))] = 1.0
    query_filter_config: Annotated[dict[str, QueryFilter], OnlyWith(zero_variance=("mask", "refill"))] = Field(
        default_factory=dict[str, QueryFilter]
    )
    """Tag -> filter of its groups by their rewards (ROLL's `rewards.DOMAIN.query_filter_config`)."""
    variance_filter_ratio: float = Field(default=1.0, gt=0, le=1)
    """Fraction of groups to train on, by highest reward deviation (StarPO-S)."""
    max_len_mask: bool = False
    """Masking of episodes that a token limit ended."""
    error_max_len_clip: bool = False
    """Masking of episodes without positive reward above `error_max_len_threshold` sampled tokens."""
    error_max_len_threshold: Annotated[int, OnlyWith(error_max_len_clip=(True,))] = Field(default=1024, ge=1)
    difficulty_loss_weight: bool = False
    """Episode's loss factor 0.5 + 1.5 (1 - group's mean reward, clamped to [0, 1])."""
    length_loss_weight: bool = False
    """Episode's loss factor 1.5 - sampled tokens / batch maximum."""

    # --- Policy loss
    pg_variant: (
        Literal["ppo", "vanilla", "tis", "cispo", "topr", "kimi15", "aipo", "dppo_tv", "sapo", "gpg"] | UserFunction
    ) = "ppo"
    """Policy loss per token; `ppo` is the clipped surrogate, `module:function` your own."""
    ratio_type: Annotated[
        Literal["token", "turn", "sequence", "sequence-token", "sequence-product"], OnlyWith(pg_variant=WITH_RATIO)
    ] = "token"
    """Unit of the ratio. `turn`, `sequence` (GSPO): geometric mean; `sequence-token`: GSPO-token; `sequence-product`:
    product. A sequence is one continuous context.
    """
    pg_clip: Annotated[float, OnlyWith(pg_variant=("ppo",))] = Field(default=0.2, gt=0)
    """Clip range, [1 - pg_clip, 1 + pg_clip]."""
    pg_clip_low: Annotated[float | None, OnlyWith(pg_variant=("ppo",))] = Field(default=None, gt=0)
    """Clip from 1 - pg_clip_low; None is `pg_clip`."""
    pg_clip_high: Annotated[float | None, OnlyWith(pg_variant=("ppo",))] = Field(default=None, gt=0)
    """Clip to 1 + pg_clip_high; None is `pg_clip`."""
    dual_clip: Annotated[float | None, OnlyWith(pg_variant=("ppo",))] = Field(default=None, gt=1)
    """Dual-clip bound for negative advantages (arXiv:1912.09729)."""
    tis_lower_bound: Annotated[float, OnlyWith(pg_variant=("tis",))] = Field(default=0.0, ge=0)
    """Minimum importance weight."""
    tis_upper_bound: Annotated[float, OnlyWith(pg_variant=("tis",))] = Field(default=2.0, gt=0)
    """Maximum importance weight."""
    cispo_epsilon_low: Annotated[float, OnlyWith(pg_variant=("cispo",))] = Field(default=1.0, gt=0)
    """Minimum weight 1 - cispo_epsilon_low; 1 is none."""
    cispo_epsilon_high: Annotated[float, OnlyWith(pg_variant=("cispo",))] = Field(default=4.0, gt=0)
    """Maximum weight 1 + cispo_epsilon_high."""
    cispo_use_unified_mask: Annotated[bool, OnlyWith(pg_variant=("cispo",))] = False
    """Masking of tokens without a gradient in PPO."""
    topr_positive_weight: Annotated[float, OnlyWith(pg_variant=("topr",))] = Field(default=1.0, ge=0)
    """Loss weight of positive advantages."""
    topr_negative_weight: Annotated[float, OnlyWith(pg_variant=("topr",))] = Field(default=1.0, ge=0)
    """Loss weight of negative advantages."""
    kimi15_tau: Annotated[float, OnlyWith(pg_variant=("kimi15",))] = Field(default=0.1, ge=0)
    aipo_rho: Annotated[float, OnlyWith(pg_variant=("aipo",))] = Field(default=4.0, gt=0)
    """Maximum importance weight; 2 to 10 in the paper."""
    dppo_mask_low: Annotated[float, OnlyWith(pg_variant=("dppo_tv",))] = Field(default=0.2, gt=0, le=1)
    """Decrease in probability that masks negative advantages."""
    dppo_mask_high: Annotated[float, OnlyWith(pg_variant=("dppo_tv",))] = Field(default=0.2, gt=0, le=1)
    """Increase in probability that masks positive advantages."""
    dppo_kl_tau: Annotated[float, OnlyWith(pg_variant=("dppo_tv",))] = Field(default=1e-3, ge=0)
    sapo_temperature_pos: Annotated[float, OnlyWith(pg_variant=("sapo",))] = Field(default=1.0, gt=0)
    sapo_temperature_neg: Annotated[float, OnlyWith(pg_variant=("sapo",))] = Field(default=1.05, gt=0)

    # --- Off-policy
    old_logprobs: Annotated[
        Literal["behavior", "recompute", "loglinear"],
        NotWith("its ratio is to the behavior policy; leave this out", pg_variant=AGAINST_BEHAVIOR),
    ] = "behavior"
    """Denominator of the ratio. `behavior`: the engine's logprobs; `recompute`: the learner's at the start of the step;
    `loglinear`: AReaL's approximation without a forward pass. Left out, `recompute` with `top_p` or `top_k`.
    """
    router_replay: bool = False
    """Whether the policy's passes send tokens to the experts that vLLM sent them to (rollout routing replay, R3,
    arXiv:2510.11370); their weights are of the learner's router. For mixtures of experts.
    """
    train_infer_correction: TrainInferCorrection = TrainInferCorrection()

    # --- Aggregation and regularization
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """Reduction of token losses; a sequence is a whole trajectory. `seq-mean-token-sum-norm` divides by
    `loss_agg_length`.
    """
    loss_agg_length: Annotated[int | None, OnlyWith(loss_agg_mode=("seq-mean-token-sum-norm",))] = Field(
        default=None, ge=1
    )
    """Divisor in tokens; None is `sequence_length`."""
    entropy_loss_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""
    entropy_loss_scheduler_type: Annotated[Scheduler, OnlyWith(entropy_loss_coef=SET)] = "constant"
    """Schedule of `entropy_loss_coef`; `linear` and `cosine` reach 0 after the last step."""
    ppo_epochs: int = Field(default=1, ge=1)
    """Passes per batch."""
    use_kl_loss: bool = False
    """Loss term `kl_loss_coef` times KL to the reference."""
    kl_loss_coef: Annotated[float, OnlyWith(use_kl_loss=(True,))] = Field(default=0.0, ge=0)
    kl_loss_type: Annotated[Literal["k2", "k3", "abs", "full"], OnlyWith(use_kl_loss=(True,))] = "k3"
    """KL estimator; `full` sums over the vocabulary. k1 is unavailable: its mean gradient is 0."""
    target_kl: Annotated[float | None, NO_TOKEN_REWARD] = Field(default=None, gt=0)
    """Target KL per token, in nats, of an adaptive coefficient (arXiv:1909.08593)."""
    init_kl_coef: Annotated[float | None, NO_TOKEN_REWARD] = Field(default=None, ge=0, validate_default=True)
    """Coefficient of the reward's KL, initial with `target_kl`. None: 0.2 with `target_kl`, else 0."""
    add_token_level_kl: Annotated[bool | None, NO_TOKEN_REWARD] = Field(default=None, validate_default=True)
    """Subtraction of `init_kl_coef` times KL to the reference from token rewards; None: if positive."""
    kl_horizon: Annotated[int, OnlyWith(target_kl=SET)] = Field(default=10_000, ge=1)
    """Time constant of adaptation, in trajectories."""
    kl_penalty: Annotated[Literal["kl", "k2", "k3", "abs", "full"], OnlyWith(add_token_level_kl=(True,))] = "kl"
    """KL estimator; `full` sums over the vocabulary and needs `old_logprobs: recompute`."""
    ref_model_sync_steps: int | None = Field(default=None, ge=1)
    """Steps between reference updates; None is never."""
    ref_model_mixup_alpha: Annotated[float, OnlyWith(ref_model_sync_steps=SET)] = Field(default=1.0, gt=0, le=1)
    """Policy's weight in updates (TR-DPO, arXiv:2404.09656); 1 copies it."""
    value_clip: Annotated[float | None, OnlyWith(adv_estimator=("gae",))] = Field(default=None, gt=0)
    """Clip range around the value before the step."""
    critic_warmup: Annotated[int, OnlyWith(adv_estimator=("gae",))] = Field(default=0, ge=0)
    """Initial steps of the critic alone."""

    @field_validator("init_kl_coef")
    @classmethod
    def _default_coefficient(cls, value: float | None, info: ValidationInfo) -> float:
        return value if value is not None else DEFAULT_KL_COEF if info.data.get("target_kl") else 0.0

    @field_validator("add_token_level_kl")
    @classmethod
    def _penalizes(cls, value: bool | None, info: ValidationInfo) -> bool:
        coefficient = info.data.get("init_kl_coef")
        if value is False and coefficient:
            raise ValueError("false leaves init_kl_coef and target_kl without effect: leave them out, or this")
        return bool(coefficient) if value is None else value

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
        if estimator in DECOUPLED and (value.grouping != "traj_group_id" or split):
            raise ValueError(
                "adv_estimator gdpo normalizes each reward within groups and their sum over the batch: only method counts"
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
        """Reward normalization with default."""
        config = self.reward_normalization
        if config.norm_mean_type or config.norm_std_type:
            both = "mean_std" if config.norm_std_type else "mean"
            return both if config.norm_mean_type else "std"
        return config.method or GROUP_METHODS.get(self.adv_estimator, "identity")

    @property
    def mean_over(self) -> Over | None:
        """Return the scope of the subtracted mean."""
        config = self.reward_normalization
        if config.norm_mean_type or config.norm_std_type:
            return config.norm_mean_type
        return "group" if self.reward_method in ("mean", "mean_std") else None

    @property
    def std_over(self) -> Over | None:
        """Return the scope of the dividing deviation."""
        config = self.reward_normalization
        if config.norm_mean_type or config.norm_std_type:
            return config.norm_std_type
        return "group" if self.reward_method == "mean_std" else None

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """Weight of each reward function by name; those of a run are its `rewards`."""
        return {}

    @property
    def num_baselines(self) -> int:
        """Greedy episodes per group."""
        return 1 if self.adv_estimator in GREEDY_BASELINE else 0

    @property
    def needs_siblings(self) -> bool:
        """Return whether a group of one always has reward advantages of zero."""
        if self.use_opd or self.adv_estimator in GREEDY_BASELINE or self.adv_estimator == "step_reinforce":
            return False
        by_group = self.reward_normalization.grouping == "traj_group_id"
        compares_group = by_group and "group" in (self.mean_over, self.std_over)
        return self.adv_estimator in (*BASELINES, "gigpo") or compares_group

    @property
    def compares_siblings(self) -> bool:
        """Return whether equal rewards in a group give no signal."""
        if self.use_opd or self.adv_estimator == "gae":  # a critic's advantages differ between equal rewards
            return False
        centers_group = self.mean_over == "group" and self.reward_normalization.grouping in ("traj_group_id", "state")
        return self.adv_estimator in BASELINES or centers_group

    @property
    def whitens_advantages(self) -> bool:
        """`whiten_advantages` with default."""
        default = self.adv_estimator in WHITENING
        return default if self.whiten_advantages is None else self.whiten_advantages

    @property
    def distills(self) -> bool:
        return self.use_opd or self.adv_estimator in DISTILLING

    @property
    def penalizes_kl(self) -> bool:
        return bool(self.add_token_level_kl and self.init_kl_coef)

    @property
    def needs_reference(self) -> bool:
        return (self.use_kl_loss and self.kl_loss_coef > 0) or self.penalizes_kl

    @property
    def needs_ref_logprobs(self) -> bool:
        in_loss = self.use_kl_loss and self.kl_loss_type != "full"
        return self.needs_reference and (in_loss or (self.penalizes_kl and self.kl_penalty != "full"))

    @property
    def full_kls(self) -> tuple[str, ...]:
        """Keys of KLs over the vocabulary."""
        requested = {"kl_loss_type": self.kl_in_loss_is_full, "kl_penalty": self.kl_in_reward_is_full}
        return tuple(key for key, is_full in requested.items() if is_full)

    @property
    def kl_in_reward_is_full(self) -> bool:
        return self.penalizes_kl and self.kl_penalty == "full"

    @property
    def kl_in_loss_is_full(self) -> bool:
        return self.use_kl_loss and self.kl_loss_coef > 0 and self.kl_loss_type == "full"


def _uses_grouping(config: RewardNormalization, estimator: str) -> bool:
    if config.norm_mean_type or config.norm_std_type:
        return "group" in (config.norm_mean_type, config.norm_std_type)
    method = config.method or GROUP_METHODS.get(estimator, "identity")
    return estimator not in BASELINES and method != "identity"
