from pydantic import Field, model_validator

from offbeat.envs.config import Config


class StalenessControllerConfig(Config):
    """Controller of staleness and groups in flight; limits apply to means over `interval` steps."""

    interval: int = Field(default=4, ge=1)
    """Steps per decision."""
    patience: int = Field(default=2, ge=1)
    """Equal decisions before a change."""
    min_staleness: float = Field(default=0.0, ge=0)
    """Minimum `max_staleness`, in policy versions."""
    max_staleness: float = Field(default=8.0, ge=0)
    """Maximum `max_staleness`, in policy versions; the initial value is between both."""
    staleness_step: float = Field(default=1.0, gt=0)
    """Change per decision, in policy versions."""
    min_env_groups: int | None = Field(default=None, ge=1)
    """Minimum groups in flight; None is one batch."""
    max_env_groups: int | None = Field(default=None, ge=1)
    """Maximum groups in flight, changed by one batch; None is `train_env_manager.num_env_groups`."""
    max_mismatch_kl: float = Field(default=0.05, gt=0)
    """`actor/mismatch_kl`, in nats per token, above which `max_staleness` is lowered."""
    min_ess: float = Field(default=0.7, gt=0, lt=1)
    """`actor/ess`, the effective sample fraction, below which `max_staleness` is lowered."""
    max_learner_idle: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of a step waiting for groups above which `max_staleness` is raised."""
    max_rollout_idle: float = Field(default=0.25, ge=0, lt=1)
    """Fraction of empty group slots at a step above which staleness limits rollouts; slots are removed unless the
    learner waits.
    """
    hysteresis: float = Field(default=0.25, ge=0, lt=1)
    """Margin inside limits before reversal, as a fraction of the distance to the best value."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> "StalenessControllerConfig":
        low, high = self.min_env_groups, self.max_env_groups
        if self.min_staleness > self.max_staleness:
            raise ValueError(f"min_staleness {self.min_staleness:g} is above max_staleness {self.max_staleness:g}")
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_env_groups {low} is above max_env_groups {high}")
        return self
