"""Configuration of the control service."""

from typing import Literal

from pydantic import Field, model_validator

from offbeat.envs.config import Config


class ControlConfig(Config):
    """REST API and reconciler."""

    host: str = "127.0.0.1"
    """Interface of the API; anything but loopback needs `token`."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the API; 0: any free one."""
    token: str | None = None
    """Bearer token required of each call."""
    read_token: str | None = None
    """Second token, for read access."""
    learner: Literal["managed", "external"] = "managed"
    """`managed`: the mesh starts and replaces the learner; `external`: it waits for `offbeat learner attach`."""
    standby_learner: bool = False
    """Keep a second, fully started learner to replace a dead one at once; takes its memory on `actor_train.device`,
    too.
    """
    reconcile_s: float = Field(default=0.5, gt=0)
    """Interval of reconciliation, s."""

    @model_validator(mode="after")
    def _check_standby(self) -> "ControlConfig":
        if self.standby_learner and self.learner == "external":
            raise ValueError(
                "standby_learner has no effect with learner=external: attach a second learner instead, it stands by"
            )
        return self


class ControlTuning(Config):
    """Live settings of the service (`user_config` of its deployment)."""

    reconcile_s: float = Field(default=0.5, gt=0)
    """Interval of reconciliation, s."""
    max_restarts: int = Field(default=5, ge=0)
    """Deaths of a component without progress before its run fails."""
    drain_timeout_s: float = Field(default=60.0, gt=0)
    """Timeout of a graceful stop, s; the run is then killed."""
