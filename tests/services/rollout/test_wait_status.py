from offbeat.services.messages.types import EpisodeKind, EpisodeTask
from offbeat.services.rollout.wait_status import Wait, Waits


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
