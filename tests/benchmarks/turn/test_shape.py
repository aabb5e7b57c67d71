"""Lengths that the floors take over from the mesh's episodes."""

import numpy as np

from offbeat.benchmarks.turn.floors import EpisodeShape
from offbeat.services.messages.types import Segment, StopReason, Trajectory, Turn


def trajectory(*turns: tuple[int, int]) -> Trajectory:
    length = turns[-1][1]
    segment = Segment(np.zeros(length, np.int32), np.zeros(length, np.bool_), np.zeros(length, np.float32), ())
    played = tuple(Turn(0, start, end, 0.0) for start, end in turns)
    return Trajectory("g", 0, 0, "tag", 0, (segment,), played, StopReason.MAX_STEPS)


def test_a_shape_is_the_mean_of_the_episodes() -> None:
    shape = EpisodeShape.of([trajectory((90, 92), (120, 122), (148, 150)), trajectory((94, 96))])
    assert shape == EpisodeShape(turns=2, first=92, chunk=27, answer=2)
    assert shape.length == 92 + 2 * 29


def test_an_episode_of_one_turn_has_a_shape() -> None:
    assert EpisodeShape.of([trajectory((5, 9))]) == EpisodeShape(turns=1, first=5, chunk=1, answer=4)
