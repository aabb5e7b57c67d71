"""Keys of reward shaping and normalization."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.trainer.config.conditions import SET, ConditionalConfig, OnlyWith

Over = Literal["batch", "group", "running"]


class RewardNormalization(ConditionalConfig):
    """Normalization of episode rewards before the estimator."""

    grouping: Literal["traj_group_id", "batch", "tags", "state"] = "traj_group_id"
    """Set of rewards to normalize within: episodes of the same task and seed, the batch, a tag, or (with `adv_estimator:
    step_reinforce`) a group's turns with the same observation."""
    method: Literal["identity", "mean", "mean_std"] | None = None
    """`mean` subtracts the grouping's mean; `mean_std` also divides by its standard deviation. None is the
    estimator's default: `mean_std` for `grpo` and `gigpo`, `mean` for `dr_grpo` and `reinforce_plus_plus_baseline`,
    `identity` otherwise. A normalized reward is placed on the episode's last token; with `identity`, each turn's reward is
    placed on the turn's last token."""
    norm_mean_type: Annotated[Over | None, OnlyWith(method=(None,))] = None
    """Scope of the subtracted mean, independent of the deviation: `group` as in `grouping`, `batch` the step's batch,
    `running` all rewards of the tag so far (checkpointed)."""
    norm_std_type: Annotated[Over | None, OnlyWith(method=(None,))] = None
    """Scope of the deviation; with a `norm_mean_type`, None skips the division."""


class RewardShaping(ConditionalConfig):
    """Penalties subtracted from an episode's reward, on its last turn, before normalization."""

    overlong_max_length: int | None = Field(default=None, ge=1)
    """Sampled tokens of an episode at which DAPO's soft penalty reaches its maximum."""
    overlong_buffer: Annotated[int, OnlyWith(overlong_max_length=SET)] = Field(default=1, ge=1)
    """Tokens below `overlong_max_length` over which the penalty increases from 0."""
    overlong_penalty: Annotated[float, OnlyWith(overlong_max_length=SET)] = Field(default=1.0, gt=0)
    """Maximum of the penalty."""
    response_length_penalty_coef: float = Field(default=0.0, ge=0)
    """Penalty per sampled token."""
    format_penalty: float = Field(default=0.0, ge=0)
    """Penalty, multiplied by 1 - `format_metric`."""
    format_metric: Annotated[str, OnlyWith(format_penalty=SET)] = "action_is_valid"
    """Metric of the env in [0, 1], averaged over the episode's turns; no penalty if the episode lacks it."""

    @property
    def is_on(self) -> bool:
        """True if any reward changes."""
        return bool(self.overlong_max_length or self.response_length_penalty_coef or self.format_penalty)
