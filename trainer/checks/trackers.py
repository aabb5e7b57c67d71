"""Trackers that a run names and can't have, told before it starts."""

from collections.abc import Iterator
from difflib import get_close_matches

from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.trackers.registry import (
    TRACKERS,
    TrackerError,
    argument_errors,
    find_tracker,
)


def check_trackers(config: LearnerConfig) -> Iterator[ConfigIssue]:
    """Every name that is none, every package that is missing, and every argument that its tracker does not take."""
    for position, name in enumerate(config.track_with):
        if name in config.track_with[:position]:
            yield ConfigIssue(f"track_with.{position}", f"{name} is named twice")
            continue
        try:
            tracker = find_tracker(name)
        except TrackerError as error:
            near = get_close_matches(name, TRACKERS, n=1)
            meant = f"; did you mean {near[0]}?" if near and name not in TRACKERS else ""
            yield ConfigIssue(f"track_with.{position}", f"{error}{meant}")
            continue
        for error in argument_errors(tracker, config.tracker_kwargs.get(name, {})):
            yield ConfigIssue(".".join(filter(None, ("tracker_kwargs", name, error.key))), str(error))
    for name in config.tracker_kwargs:
        if name not in config.track_with:
            yield ConfigIssue(f"tracker_kwargs.{name}", f"has no effect: track_with does not name {name}")
