"""Configuration of the control service (`control` in a run's YAML)."""

from typing import Literal

from pydantic import Field, model_validator

from offbeat.envs.config import Config


class ControlConfig(Config):
    """The REST API and the reconciler."""

    host: str = "127.0.0.1"
    """Interface that the API listens on; anything but loopback needs `token`."""
    port: int = Field(default=0, ge=0, le=65535)
    """0 takes a free one."""
    token: str | None = None
    """Bearer token that each call must carry."""
    read_token: str | None = None
    """Second token, for read access."""
    learner: Literal["managed", "external"] = "managed"
    """`managed`: the mesh starts the learner and replaces a dead one; `external`: it waits for `offbeat learner attach`."""
    standby_learner: bool = False
    """Keep a second learner process: fully started, waiting, it takes over as soon as the first one dies. Costs that
    process's memory, on `actor_train.device`, too."""
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
    """Settings that can change while the service runs (`user_config` of its deployment)."""

    reconcile_s: float = Field(default=0.5, gt=0)
    """Interval of reconciliation, s."""
    max_restarts: int = Field(default=5, ge=0)
    """Deaths of a part without progress between them before its run is failed."""
    drain_timeout_s: float = Field(default=60.0, gt=0)
    """Timeout of a graceful stop, after which the run is stopped at once."""
