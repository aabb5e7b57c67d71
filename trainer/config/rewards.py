"""How episode rewards are shaped and made comparable."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.trainer.config.conditions import SET, ConditionalConfig, OnlyWith

Over = Literal["batch", "group", "running"]


class RewardNormalization(ConditionalConfig):
    """How episode rewards become comparable before the estimator sees them."""

    grouping: Literal["traj_group_id", "batch", "tags", "state"] = "traj_group_id"
    """What a group is: siblings of one task and seed, the whole batch, a tag, or (`adv_estimator: step_reinforce`) the
    sibling turns that answered the same observation."""
    method: Literal["identity", "mean", "mean_std"] | None = None
    """`mean` subtracts the grouping's mean; `mean_std` also divides by its standard deviation. None takes the estimator's
    own: `mean_std` for `grpo` and `gigpo`, `mean` for `dr_grpo` and `reinforce_plus_plus_baseline`, `identity` for the
    others. An episode's normalised reward stands on its last token; with `identity` each turn's stands on the turn's last
    one."""
    norm_mean_type: Annotated[Over | None, OnlyWith(method=(None,))] = None
    """Where the subtracted mean comes from, apart from the deviation: `group` is what `grouping` says, `batch` the step's
    batch, `running` all rewards of the tag so far (checkpointed)."""
    norm_std_type: Annotated[Over | None, OnlyWith(method=(None,))] = None
    """Where the deviation comes from; None with a `norm_mean_type` divides by none."""


class RewardShaping(ConditionalConfig):
    """What is taken off an episode's reward, on its last turn, before rewards are compared."""

    overlong_max_length: int | None = Field(default=None, ge=1)
    """Sampled tokens of an episode at which DAPO's soft penalty is full."""
    overlong_buffer: Annotated[int, OnlyWith(overlong_max_length=SET)] = Field(default=1, ge=1)
    """Tokens below it over which the penalty rises from 0."""
    overlong_penalty: Annotated[float, OnlyWith(overlong_max_length=SET)] = Field(default=1.0, gt=0)
    """The full penalty."""
    response_length_penalty_coef: float = Field(default=0.0, ge=0)
    """Taken off for each sampled token."""
    format_penalty: float = Field(default=0.0, ge=0)
    """Taken off in proportion to 1 - `format_metric`."""
    format_metric: Annotated[str, OnlyWith(format_penalty=SET)] = "action_is_valid"
    """A metric of the env in [0, 1], averaged over the episode's turns; one that an episode lacks costs nothing."""

    @property
    def is_on(self) -> bool:
        """Whether any reward changes."""
        return bool(self.overlong_max_length or self.response_length_penalty_coef or self.format_penalty)
