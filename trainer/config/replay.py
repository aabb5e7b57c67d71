"""Keys of sample reuse, under the names of Reverb (arXiv:2102.04736)."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.trainer.config.conditions import SET, ConditionalConfig, OnlyWith

ON = OnlyWith(samples_per_insert=SET)
PRIORITIZED = OnlyWith(sampler=("prioritized",))


class ReplayConfig(ConditionalConfig):
    """Sample reuse: the learner retains groups with signal and adds some of them to later batches."""

    samples_per_insert: float | None = Field(default=None, gt=1)
    """Mean number of batches that a group is part of, including the first; with 2, half of each batch is replayed. None
    disables replay."""
    max_times_sampled: Annotated[int, ON] = Field(default=4, ge=2)
    """Maximum number of batches that a group is part of."""
    max_size: Annotated[int, ON] = Field(default=256, ge=1)
    """Capacity of the buffer, in groups; the oldest are evicted."""
    max_staleness: Annotated[float | None, ON] = Field(default=None, ge=0)
    """Maximum lag of a replayed group, in policy versions; None is the run's `max_staleness`, which bounds the lag at its
    first use."""
    sampler: Annotated[Literal["fifo", "lifo", "uniform", "prioritized"], ON] = "uniform"
    """Order of sampling: oldest first, newest first, uniform, or by reward deviation within the group."""
    priority_exponent: Annotated[float, ON, PRIORITIZED] = Field(default=0.6, ge=0)
    """Exponent of the reward deviation in a group's sampling probability (arXiv:1511.05952)."""
    importance_sampling_exponent: Annotated[float, ON, PRIORITIZED] = Field(default=0.4, ge=0, le=1)
    """Exponent beta of a group's loss weight (1 / (N P))^beta, relative to the batch's largest; 1 removes the bias of
    prioritized sampling."""
