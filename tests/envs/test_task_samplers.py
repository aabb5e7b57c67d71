"""Levels: unlocking, review of earlier levels, state."""

import json
from collections import Counter

import numpy as np
import pytest

from offbeat.envs.task_samplers import Levels


def drawn(levels: Levels, count: int = 400) -> Counter[str]:
    return Counter(levels.draw(np.random.default_rng(i))[0] for i in range(count))


def test_mastering_a_level_unlocks_the_next_and_keeps_earlier_ones():
    levels = Levels(("easy", "middle", "hard"), at=0.75, window=2, review=0.25)
    assert drawn(levels) == {"easy": 400}
    levels.learn("easy", 1, [1.0, 0.0], [1.0, 0.0])
    levels.learn("easy", 2, [1.0, 1.0], [1.0, 1.0])
    counts = drawn(levels)
    assert set(counts) == {"easy", "middle"}
    assert 60 < counts["easy"] < 140
    levels.learn("easy", 3, [1.0], [1.0])
    levels.learn("easy", 4, [1.0], [1.0])
    assert drawn(levels) == counts, "mastering an old level again moves nothing"
    for success in (1.0, 0.4, 1.0, 1.0, 1.0, 1.0):
        levels.learn("middle", 5, [success], [success])
    assert set(drawn(levels)) == {"easy", "middle", "hard"}


def test_the_window_is_the_newest_groups():
    levels = Levels(("easy", "hard"), at=1.0, window=2, review=0.0)
    for success in (1.0, 0.0, 1.0):
        levels.learn("easy", 1, [success], [success])
    assert drawn(levels) == {"easy": 400}
    levels.learn("easy", 1, [1.0], [1.0])
    assert drawn(levels) == {"hard": 400}


def test_state_survives_json():
    levels, again = Levels(("easy", "hard"), window=3), Levels(("easy", "hard"), window=3)
    for _ in range(2):
        levels.learn("easy", 1, [1.0], [1.0])
    again.load_state_dict(json.loads(json.dumps(levels.state_dict())))
    for sampler in (levels, again):
        sampler.learn("easy", 1, [1.0], [1.0])
    assert drawn(again) == drawn(levels)
    assert "hard" in drawn(again)


def test_invalid_settings_are_refused():
    with pytest.raises(ValueError, match=r"at in \(0, 1\]"):
        Levels(("a",), at=0.0)
