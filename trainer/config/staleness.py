"""The controller that sets how far rollouts run ahead of the learner, and how many groups are in play."""

from pydantic import Field, model_validator

from offbeat.envs.config import Config


class StalenessControllerConfig(Config):
    """What it keeps to. Its limits are on the mean over `interval` steps."""

    interval: int = Field(default=4, ge=1)
    """Steps that are averaged for one judgement."""
    patience: int = Field(default=2, ge=1)
    """Judgements in a row that must ask for the same before it is done."""
    min_staleness: float = Field(default=0.0, ge=0)
    max_staleness: float = Field(default=8.0, ge=0)
    """The run's `max_staleness`, where it starts, stays between the two."""
    staleness_step: float = Field(default=1.0, gt=0)
    """Versions by which the bound rises or falls at a time."""
    min_env_groups: int | None = Field(default=None, ge=1)
    """Fewest groups in play; None takes one batch of them."""
    max_env_groups: int | None = Field(default=None, ge=1)
    """Most groups in play; None takes `train_env_manager.num_env_groups`, the first number. It moves by a batch."""
    max_mismatch_kl: float = Field(default=0.05, gt=0)
    """`actor/mismatch_kl`, nats per token, above which the data is too old: the staleness bound falls."""
    min_ess: float = Field(default=0.7, gt=0, lt=1)
    """`actor/ess`, share of the sample that its importance weights leave, below which it falls as well."""
    max_learner_idle: float = Field(default=0.1, ge=0, lt=1)
    """Share of a step that the learner waits for groups, above which rollouts may run further ahead."""
    max_rollout_idle: float = Field(default=0.25, ge=0, lt=1)
    """Share of the places for groups that are empty when a step is trained, above which the bound, not the rollouts' speed,
    is what the learner waits for; where it does not wait, places are taken away."""
    hysteresis: float = Field(default=0.25, ge=0, lt=1)
    """How far inside a limit a figure must be before what the limit forced is undone: the share of the way to the best."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "StalenessControllerConfig":
        low, high = self.min_env_groups, self.max_env_groups
        if self.min_staleness > self.max_staleness:
            raise ValueError(f"min_staleness {self.min_staleness:g} is above max_staleness {self.max_staleness:g}")
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_env_groups {low} is above max_env_groups {high}")
        return self
