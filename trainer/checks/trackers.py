"""Checks of trackers."""

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
    for position, name in enumerate(config.track_with):
        if name in config.track_with[:position]:
            yield ConfigIssue(f"track_with.{position}", f"{name} is listed twice")
            continue
        try:
            tracker = find_tracker(name)
        except TrackerError as error:
            matches = get_close_matches(name, TRACKERS, n=1)
            suggestion = f"; did you mean {matches[0]}?" if matches and name not in TRACKERS else ""
            yield ConfigIssue(f"track_with.{position}", f"{error}{suggestion}")
            continue
        for error in argument_errors(tracker, config.tracker_kwargs.get(name, {})):
            yield ConfigIssue(".".join(filter(None, ("tracker_kwargs", name, error.key))), str(error))
    for name in config.tracker_kwargs:
        if name not in config.track_with:
            yield ConfigIssue(f"tracker_kwargs.{name}", f"has no effect: track_with does not list {name}")
