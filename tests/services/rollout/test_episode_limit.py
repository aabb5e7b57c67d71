"""The limit of episodes follows the engines' KV cache."""

from dataclasses import replace

import pytest

from offbeat.services.rollout.episode_limit import COOLDOWN, USAGE_LAG, EpisodeLimit
from offbeat.services.weights.replica_reports import ReplicaLoad

IDLE = ReplicaLoad(kv_usage=0.1, kv_tokens=64_000)
FULL = replace(IDLE, kv_usage=0.9)


def limit_of(most: int = 128) -> EpisodeLimit:
    return EpisodeLimit(0.6, most, num_workers=2, sequence_length=1000)


def turn_over(limit: EpisodeLimit, load: ReplicaLoad = IDLE, times: int = 1) -> int:
    """Let all episodes in play end once, in four observations."""
    for _ in range(4 * times):
        limit.observe({"r0": load}, limit.limit, -(-limit.limit // 4))
    return limit.limit


def test_one_episode_is_played_until_an_engine_reports_and_all_if_it_tells_no_load() -> None:
    limit = limit_of()
    assert limit.observe({}, 1, 0) == ""
    assert limit.limit == 1
    assert limit.observe({"r0": ReplicaLoad(running=3)}, 1, 0) == ""
    assert limit.limit == 128
    limit.observe({}, 128, 0)  # all reports are old
    assert limit.limit == 128
    limit.observe({"r0": IDLE}, 128, 0)
    limit.observe({}, 32, 0)  # the engine is replaced
    assert limit.limit == 32


def test_the_first_limit_is_of_episodes_that_fit_at_full_length() -> None:
    limit = limit_of()
    limit.observe({"r0": IDLE, "r1": replace(IDLE, kv_tokens=16_000)}, 0, 0)
    assert limit.limit == 40  # of 80 for two workers


def test_replicas_that_report_later_add_the_episodes_that_fit_into_them() -> None:
    limit = limit_of()
    limit.observe({"r0": IDLE}, 0, 0)
    limit.observe({"r0": IDLE, "r1": replace(IDLE, kv_tokens=16_000)}, 0, 0)
    assert limit.limit == 40
    small = [EpisodeLimit(0.6, 128, num_workers=8, sequence_length=32_000) for _ in range(2)]
    small[0].observe({"r0": IDLE}, 0, 0)
    for each in small:
        each.observe({"r0": IDLE, "r1": IDLE}, 0, 0)
    assert [each.limit for each in small] == [1, 1]


def test_more_replicas_raise_a_reduced_limit_in_proportion_and_replaced_ones_do_not() -> None:
    limit = limit_of()
    limit.observe({"r0": IDLE, "r1": IDLE}, 64, 0)
    limit.observe({"r0": IDLE, "r1": FULL}, 64, 0)
    assert limit.limit == 36
    for names in (["r0"], [], ["r0", "r2"], ["r3", "r2"]):
        limit.observe(dict.fromkeys(names, IDLE), 36, 0)
        assert limit.limit == 36
    limit.observe(dict.fromkeys(["r3", "r2", "r4"], IDLE), 36, 0)
    assert limit.limit == 54


def test_the_limit_grows_as_episodes_end_and_no_further_than_the_configured_one() -> None:
    limit = limit_of()
    limit.observe({"r0": IDLE}, 0, 0)
    assert limit.limit == 32
    for _ in range(100):  # time alone changes nothing
        limit.observe({"r0": IDLE}, 32, 0)
    assert limit.limit == 32
    assert 40 <= turn_over(limit) <= 44
    assert turn_over(limit, times=20) == 128


def test_a_limit_that_does_not_bind_stays() -> None:
    limit = limit_of()
    limit.observe({"r0": IDLE}, 0, 0)
    limit.observe({"r0": IDLE}, 20, 20)
    assert limit.limit == 32


@pytest.mark.parametrize("usage", [0.52, 0.6])
def test_between_the_marks_the_limit_stays(usage: float) -> None:
    limit = limit_of()
    assert turn_over(limit, replace(IDLE, kv_usage=usage), times=5) == 32


def test_usage_above_the_target_shrinks_the_limit_to_what_keeps_below_it() -> None:
    limit = limit_of()
    limit.observe({"r0": IDLE}, 0, 0)
    assert limit.observe({"r0": FULL}, 30, 0) == "90% of the KV cache is in use"
    assert limit.limit == 17  # 30 * .85 * .6 / .9
    for _ in range(COOLDOWN):  # the episodes in play end first
        assert limit.observe({"r0": FULL}, 30, 0) == ""
    for _ in range(USAGE_LAG - 1):
        assert limit.observe({"r0": FULL}, 17, 3) == ""
    assert limit.observe({"r0": FULL}, 17, 3) != ""
    assert limit.limit == 9


@pytest.mark.parametrize("load", [FULL, replace(IDLE, preemptions=1)])
def test_a_batch_that_ends_shrinks_the_limit_by_the_episodes_that_made_the_load(load: ReplicaLoad) -> None:
    """The reported load is seconds old, in which most of the episodes have ended."""
    at_once, late = limit_of(), limit_of()
    for each in (at_once, late):
        each.observe({"r0": IDLE}, 32, 0)
    at_once.observe({"r0": load}, 32, 0)
    late.observe({"r0": IDLE}, 20, 12)
    late.observe({"r0": IDLE}, 8, 12)
    assert late.observe({"r0": load}, 2, 6) != ""
    assert late.limit == at_once.limit > 16


def test_the_fullest_replica_counts() -> None:
    limit = limit_of()
    assert limit.observe({"r0": IDLE, "r1": FULL}, 30, 0) != ""


def test_preemptions_shrink_the_limit_once_each() -> None:
    limit = limit_of()
    earlier = replace(IDLE, preemptions=7)  # of the time before this worker
    assert limit.observe({"r0": earlier}, 30, 0) == ""
    later = replace(IDLE, preemptions=9)
    assert limit.observe({"r0": later}, 30, 5) == "2 request(s) were preempted"
    assert limit.limit == 24
    for _ in range(2 * COOLDOWN):
        assert limit.observe({"r0": later}, 20, 0) == ""
    assert limit.limit == 24


def test_a_new_engine_starts_its_count_anew() -> None:
    limit = limit_of()
    limit.observe({"r0": replace(IDLE, preemptions=7)}, 30, 0)
    assert limit.observe({"r0": IDLE}, 30, 0) == ""


def test_one_episode_is_always_played_and_more_when_there_is_room_again() -> None:
    limit = limit_of()
    for _ in range(20 * COOLDOWN):
        limit.observe({"r0": replace(FULL, kv_usage=1.0)}, limit.limit, 0)
    assert limit.limit == 1
    assert turn_over(limit, times=5) >= 4


def test_a_worker_that_plays_nothing_keeps_its_limit() -> None:
    limit = limit_of()
    limit.observe({"r0": replace(FULL, preemptions=1)}, 0, 0)
    limit.observe({"r0": replace(FULL, preemptions=3)}, 0, 0)
    assert limit.limit == 32
