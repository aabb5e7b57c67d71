"""Keys of sample reuse, named as in Reverb (arXiv:2102.04736)."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.trainer.config.conditions import SET, ConditionalConfig, OnlyWith

ON = OnlyWith(samples_per_insert=SET)
PRIORITIZED = OnlyWith(sampler=("prioritized",))


class ReplayConfig(ConditionalConfig):
    """Replay of groups with signal in later batches."""

    samples_per_insert: float | None = Field(default=None, gt=1)
    """Mean batches per group, including the first; 2 replays half of each batch. None disables replay."""
    max_times_sampled: Annotated[int, ON] = Field(default=4, ge=2)
    """Maximum batches per group."""
    max_size: Annotated[int, ON] = Field(default=256, ge=1)
    """Capacity in groups; the oldest are evicted."""
    max_staleness: Annotated[float | None, ON] = Field(default=None, ge=0)
    """Maximum lag of replayed groups, in policy versions; None: the run's."""
    sampler: Annotated[Literal["fifo", "lifo", "uniform", "prioritized"], ON] = "uniform"
    """Order: oldest, newest, uniform, or by reward deviation within the group."""
    priority_exponent: Annotated[float, ON, PRIORITIZED] = Field(default=0.6, ge=0)
    """Exponent of the reward deviation in sampling probabilities (arXiv:1511.05952)."""
    importance_sampling_exponent: Annotated[float, ON, PRIORITIZED] = Field(default=0.4, ge=0, le=1)
    """Exponent beta of loss weights (1 / (N P))^beta over the batch's largest; 1 is unbiased."""
