"""Summaries of played episodes."""

import numpy as np
import pytest
from msgspec import structs

from offbeat.deploy.play.summary import describe, success_interval, summarize, to_json
from offbeat.services.messages.types import Segment, StopReason, Trajectory, Turn, VersionSpan


def episode(group: int, index: int, *, success: float | None, tag: str = "T", is_truncated: bool = False) -> Trajectory:
    mask = np.array([False, True, True])
    segment = Segment(np.arange(3, dtype=np.int32), mask, np.zeros(3, np.float32), (VersionSpan(1, 3, 0),))
    metrics = {} if success is None else {"success": success}
    turns = (Turn(0, 1, 3, 1.0, is_truncated=is_truncated),)
    return Trajectory(str(group), index, 0, tag, group, (segment,), turns, StopReason.TERMINATED, metrics)


def test_a_tag_without_success_is_not_counted_as_failing():
    episodes = [
        episode(0, 0, success=1.0),
        episode(0, 1, success=0.0, is_truncated=True),
        episode(1, 0, success=None, tag="U"),
        episode(1, 1, success=None, tag="U"),
    ]
    summaries = summarize(episodes, 2)
    assert list(summaries) == ["", "T", "U"]
    assert summaries[""].success == summaries["T"].success == 0.5
    assert summaries[""].pass_at == {"pass@1": 0.5, "pass@2": 1.0}
    assert (summaries["T"].truncated, summaries[""].truncated) == (0.5, 0.25)
    assert (summaries["U"].success, summaries["U"].pass_at) == (None, {})
    assert to_json(summaries)["tags"]["U"] == {  # type: ignore[index]
        "episodes": 2,
        "reward": 1.0,
        "turns": 1.0,
        "tokens": 2.0,
        "truncated": 0.0,
    }
    assert list(describe(summaries)) == [
        "reward 1, mean of 4 episodes",
        "success 0.5, 95 % confidence interval 0.095 to 0.905",
        "pass@1 0.5",
        "pass@2 1",
        "T: 2 episodes, reward 1, success 0.5, pass@1 0.5, pass@2 1, 1 turns, 2 tokens, 50% truncated",
        "U: 2 episodes, reward 1, 1 turns, 2 tokens, 0% truncated",
    ]


def test_pass_at_k_is_of_whole_groups():
    summary = summarize([episode(0, 0, success=1.0), episode(1, 0, success=0.0), episode(1, 1, success=0.0)], 2)[""]
    assert summary.success == pytest.approx(1 / 3)
    assert summary.pass_at == {"pass@1": 0.0, "pass@2": 0.0}
    assert summarize([], 1) == to_json({}) == {}


def test_the_interval_takes_groups_of_one_task_together():
    """As of more episodes than a dataset has rows, which then come again."""
    episodes = [episode(group, 0, success=float(group % 2)) for group in range(8)]
    again = [structs.replace(each, seed=each.seed % 2) for each in episodes]
    assert summarize(episodes, 1)[""].success_interval == success_interval([[each % 2 == 1] for each in range(8)])
    assert summarize(again, 1)[""].success_interval == success_interval([[False] * 4, [True] * 4])
    other = [structs.replace(each, tag="U") for each in again[1::2]]
    assert summarize([*again[::2], *other], 1)[""].success_interval == summarize(again, 1)[""].success_interval


def test_the_interval_of_independent_episodes_is_wilsons():
    """15 of 50, and none of 64."""
    interval = success_interval([[True]] * 15 + [[False]] * 35)
    assert interval == pytest.approx((0.1910, 0.4375), abs=1e-4)
    assert success_interval([[False]] * 64) == pytest.approx((0.0, 0.0566), abs=1e-4)


def test_episodes_of_a_task_that_are_alike_count_once():
    alike = [[True] * 4] * 15 + [[False] * 4] * 35
    assert success_interval(alike) == pytest.approx(success_interval([[True]] * 15 + [[False]] * 35))
    mixed = [[True, False, True, False]] * 50
    independent = [[True]] * 100 + [[False]] * 100
    assert success_interval(mixed) == pytest.approx(success_interval(independent))
    assert success_interval([[True] * 4] * 5) == pytest.approx(success_interval([[True]] * 5))


def test_the_interval_holds_the_share_in_95_of_100_samples_of_grouped_tasks():
    """Tasks differ in difficulty; an interval of independent episodes held it in 74."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        difficulty = rng.beta(1.0, 1.5, size=64)
        groups = (rng.random((64, 8)) < difficulty[:, None]).tolist()
        low, high = success_interval(groups)
        held += low <= 0.4 <= high
    assert 925 <= held <= 975
