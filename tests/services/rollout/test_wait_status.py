import pytest

from offbeat.services.messages.types import EpisodeKind, EpisodeTask
from offbeat.services.rollout import wait_status
from offbeat.services.rollout.wait_status import CpuShare, Wait, Waits


def task(number: int, index: int) -> EpisodeTask:
    return EpisodeTask(EpisodeKind.TRAIN, f"run-{number}", number, index, 0, 0)


def test_waits_are_counted_by_group_and_say_since_when_the_longest():
    now = [10.0]
    waits = Waits(clock=lambda: now[0])
    waits.begin(task(4, 0)).enter(Wait.GENERATION)
    now[0] = 12.0
    waits.begin(task(4, 1)).enter(Wait.GENERATION)
    waits.begin(task(4, 2))
    waits.begin(task(5, 0)).enter(Wait.ENV)
    waits.begin(EpisodeTask(EpisodeKind.EVAL, "before-greedy-0", 3, 3, 0, 0)).enter(Wait.ENV)
    assert waits.report() == {
        "at": 12.0,
        "groups": {"4": {"generation": [2, 10.0], "place": [1, 12.0]}, "5": {"env": [1, 12.0]}},
        "evaluations": {"before-greedy-0": {"env": [1, 12.0]}},
    }


def test_an_episode_that_is_over_waits_for_nothing():
    waits = Waits()
    waits.begin(task(0, 0)).enter(Wait.ENV)
    waits.leave(task(0, 0))
    waits.leave(task(0, 1))
    assert waits.report()["groups"] == {}


def test_cpu_is_a_mean_over_the_last_calls(monkeypatch: pytest.MonkeyPatch):
    """A second idle, then .5 and 1.5 cores."""
    now = iter([0.0, 1.0, 2.0, 3.0, 3.0])
    cpu_s = iter([7.0, 7.0, 7.5, 9.0, 9.0])
    monkeypatch.setattr(wait_status.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(wait_status.time, "process_time", lambda: next(cpu_s))
    share = CpuShare(2)
    assert [share.take() for _ in range(3)] == [0.0, 0.25, 1.0]
    assert share.take() == pytest.approx(1.5)
