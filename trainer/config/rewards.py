"""Keys of rewards."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.trainer.config.conditions import SET, ConditionalConfig, OnlyWith
from offbeat.trainer.config.user_function import UserFunction

Over = Literal["batch", "group", "running"]


class RewardNormalization(ConditionalConfig):
    """Normalization of episode rewards."""

    grouping: Literal["traj_group_id", "batch", "tags", "state"] = "traj_group_id"
    """Rewards normalized together: same task and seed, batch, tag, or a group's turns with equal observations
    (`step_reinforce`).
    """
    method: Literal["identity", "mean", "mean_std"] | None = None
    """`mean` subtracts the mean; `mean_std` also divides by the deviation. None: `mean_std` for `grpo` and `gigpo`,
    `mean` for `dr_grpo` and `reinforce_plus_plus_baseline`, else `identity`. Normalized rewards are on an episode's
    last token, `identity`'s on each turn's.
    """
    norm_mean_type: Annotated[Over | None, OnlyWith(method=(None,))] = None
    """Scope of the mean: `group` (as `grouping`), `batch`, or `running` (the tag's rewards so far, checkpointed)."""
    norm_std_type: Annotated[Over | None, OnlyWith(method=(None,))] = None
    """Scope of the deviation; with `norm_mean_type`, None skips division."""


class RewardShaping(ConditionalConfig):
    """Penalties on an episode's last turn, before normalization."""

    overlong_max_length: int | None = Field(default=None, ge=1)
    """Sampled tokens of an episode at which DAPO's soft penalty is maximal."""
    overlong_buffer: Annotated[int, OnlyWith(overlong_max_length=SET)] = Field(default=1, ge=1)
    """Tokens below `overlong_max_length` over which the penalty grows from 0."""
    overlong_penalty: Annotated[float, OnlyWith(overlong_max_length=SET)] = Field(default=1.0, gt=0)
    """Greatest penalty, from `overlong_max_length` on."""
    response_length_penalty_coef: float = Field(default=0.0, ge=0)
    """Penalty per sampled token."""
    format_penalty: float = Field(default=0.0, ge=0)
    """Penalty times 1 - `format_metric`."""
    format_metric: Annotated[str, OnlyWith(format_penalty=SET)] = "action_is_valid"
    """Env metric, mean over turns, clamped to [0, 1]; no penalty if absent or not finite."""

    function: UserFunction | None = None
    """Reward of your own, `module:function`, added to the others'."""

    @property
    def is_on(self) -> bool:
        """Whether any reward changes."""
        return bool(
            self.overlong_max_length or self.response_length_penalty_coef or self.format_penalty or self.function
        )
