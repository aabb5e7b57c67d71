"""Training on groups more than once, in the words of Reverb (arXiv:2102.04736)."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.trainer.config.conditions import SET, ConditionalConfig, OnlyWith

ON = OnlyWith(samples_per_insert=SET)
PRIORITIZED = OnlyWith(sampler=("prioritized",))


class ReplayConfig(ConditionalConfig):
    """Groups that carried signal are kept by the learner, and some of them join later batches."""

    samples_per_insert: float | None = Field(default=None, gt=1)
    """How often a group is trained on, on average, its first time counted: with 2, half of a batch are old groups. None:
    once."""
    max_times_sampled: Annotated[int, ON] = Field(default=4, ge=2)
    """Batches that a group may be part of."""
    max_size: Annotated[int, ON] = Field(default=256, ge=1)
    """Groups that are kept; the oldest go."""
    max_staleness: Annotated[float | None, ON] = Field(default=None, ge=0)
    """Versions that a group may lag behind when it is trained on again; None takes the run's `max_staleness`, which bounds
    what it lags at the first time."""
    sampler: Annotated[Literal["fifo", "lifo", "uniform", "prioritized"], ON] = "uniform"
    """Which of those kept: the oldest, the newest, any, or those whose members' rewards differ most."""
    priority_exponent: Annotated[float, ON, PRIORITIZED] = Field(default=0.6, ge=0)
    """A group's probability is in proportion to its reward deviation to this power (arXiv:1511.05952)."""
    importance_sampling_exponent: Annotated[float, ON, PRIORITIZED] = Field(default=0.4, ge=0, le=1)
    """Weighs a group's policy loss by (1 / (N P))^this, over the batch's largest; 1 undoes the bias of prioritising."""
