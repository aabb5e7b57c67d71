"""Keys of the controller that sets how far rollouts run ahead of the learner and how many groups are in flight."""

from pydantic import Field, model_validator

from offbeat.envs.config import Config


class StalenessControllerConfig(Config):
    """Controller of staleness and groups in flight. Its limits apply to means over `interval` steps."""

    interval: int = Field(default=4, ge=1)
    """Steps averaged per decision."""
    patience: int = Field(default=2, ge=1)
    """Consecutive equal decisions required before a change."""
    min_staleness: float = Field(default=0.0, ge=0)
    """Lower bound of `max_staleness`, in policy versions."""
    max_staleness: float = Field(default=8.0, ge=0)
    """Upper bound of `max_staleness`, in policy versions. The run's initial value must be within both bounds."""
    staleness_step: float = Field(default=1.0, gt=0)
    """Change of `max_staleness` per decision, in policy versions."""
    min_env_groups: int | None = Field(default=None, ge=1)
    """Minimum of groups in flight; None is one batch."""
    max_env_groups: int | None = Field(default=None, ge=1)
    """Maximum of groups in flight, which change by one batch at a time; None is `train_env_manager.num_env_groups`, the
    initial number."""
    max_mismatch_kl: float = Field(default=0.05, gt=0)
    """Limit of `actor/mismatch_kl`, in nats per token, above which `max_staleness` is lowered."""
    min_ess: float = Field(default=0.7, gt=0, lt=1)
    """Limit of `actor/ess`, the effective fraction of the sample under its importance weights, below which `max_staleness`
    is lowered."""
    max_learner_idle: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of a step that the learner waits for groups, above which `max_staleness` is raised."""
    max_rollout_idle: float = Field(default=0.25, ge=0, lt=1)
    """Fraction of group slots that are empty when a step is trained, above which the staleness bound rather than the
    rollouts' speed limits the learner. If the learner does not wait, slots are removed."""
    hysteresis: float = Field(default=0.25, ge=0, lt=1)
    """Margin inside a limit, as a fraction of the distance to the best value, that a metric must reach before a change is
    reverted."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "StalenessControllerConfig":
        low, high = self.min_env_groups, self.max_env_groups
        if self.min_staleness > self.max_staleness:
            raise ValueError(f"min_staleness {self.min_staleness:g} is above max_staleness {self.max_staleness:g}")
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_env_groups {low} is above max_env_groups {high}")
        return self
