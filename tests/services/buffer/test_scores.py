"""Scores beside a group's trajectories: claimed in order, kept once, gone with the group."""

import threading

import numpy as np
import pytest

from offbeat.services.buffer.api import Proof
from offbeat.services.buffer.scores import (
    GroupLostError,
    RedisGroupScores,
    RedisScoreQueue,
    ScoreRefusedError,
)
from offbeat.services.buffer.scripts import BufferKeys
from offbeat.services.errors import ForeignRunError
from tests.services.buffer.buffer_play import RUN, Run, run_uid
from tests.waiting import wait_until_sync

KEY = "reference@0123456789ab"
VALUES = np.arange(3, dtype="<f4").tobytes()


def queue(run: Run, scorer: str, *, key: str = KEY, lease_s: float = 30.0, selection: str = "") -> RedisScoreQueue:
    return RedisScoreQueue(run.redis, RUN, run_uid(run.redis), scorer, key, lease_s=lease_s, selection=selection)


def add_scored_groups(run: Run, count: int) -> None:
    keys = BufferKeys(RUN)
    with run.redis.pipeline(transaction=False) as pipe:
        for number in range(1_000_000, 1_000_000 + count):
            pipe.xadd(keys.stream, {"n": number, "v": 0, "t": "1.0"})
            pipe.hset(f"{keys.root}:blobs:t:{number}", mapping={"0": b"", KEY: b"v"})
        pipe.execute()


def count_commands(run: Run) -> int:
    return sum(row["calls"] for row in run.redis.info("commandstats").values())  # type: ignore[union-attr]


def claimed(queue: RedisScoreQueue) -> int | None:
    claim = queue.claim()
    return None if claim.claimed is None else claim.claimed.number


async def test_scorers_claim_groups_in_stream_order_and_one_each(run: Run):
    await run.complete_groups(2)
    a, b, c = queue(run, "a"), queue(run, "b"), queue(run, "c")
    assert [claimed(each) for each in (a, b, c)] == [0, 1, None]
    assert a.claim().num_missing == 2
    assert claimed(queue(run, "a")) == 0, "a restarted scorer continues with its group"
    assert a.submit(0, VALUES)
    assert claimed(a) is None
    assert a.claim().num_missing == 1


async def test_a_claimed_group_is_what_the_learner_takes(run: Run):
    await run.complete_groups(1)
    claim = queue(run, "a").claim().claimed
    taken = run.learner.take(0)
    assert claim is not None
    assert claim.group is not None
    assert taken is not None
    assert (claim.group.entry_id, claim.group.admitted_version) == (taken.entry_id, taken.admitted_version)
    assert [len(t.segments[0].tokens) for t in claim.group.trajectories] == [
        len(t.segments[0].tokens) for t in taken.trajectories
    ]


async def test_the_group_of_a_dead_scorer_is_scored_by_another_and_once(run: Run):
    await run.complete_groups(1)
    dead, other = queue(run, "dead"), queue(run, "other")
    assert claimed(dead) == 0
    assert claimed(other) is None
    assert queue(run, "dead", lease_s=0.05).renew(0), "the rest of its lease"
    wait_until_sync(lambda: claimed(other) == 0)
    assert not dead.renew(0)
    assert other.submit(0, VALUES)
    assert not dead.submit(0, bytes(12)), "a late score changes nothing"
    assert RedisGroupScores(run.redis, RUN).wait(0, [KEY], 0) == {KEY: VALUES}


async def test_a_renewed_claim_outlives_its_lease(run: Run):
    await run.complete_groups(1)
    slow, other = queue(run, "slow", lease_s=0.3), queue(run, "other")
    assert claimed(slow) == 0
    assert queue(run, "slow", lease_s=30.0).renew(0)
    threading.Event().wait(0.4)
    assert claimed(other) is None


async def test_scores_go_with_their_group(run: Run):
    await run.complete_groups(1)
    a = queue(run, "a")
    assert claimed(a) == 0
    assert a.submit(0, VALUES)
    other = queue(run, "a", key="teacher.one@0123456789ab")
    assert claimed(other) == 0
    taken = run.next_learner().take(0)
    assert taken is not None, "a group with scores beside it is still read"
    assert run.learner.ack([taken.entry_id], 1) == 1
    assert not other.submit(0, VALUES)
    assert run.keys_left("blobs") == []


async def test_a_wait_ends_with_the_last_score_and_no_other_models(run: Run):
    await run.complete_groups(1)
    scores = RedisGroupScores(run.redis, RUN)
    a, other = queue(run, "a"), queue(run, "a", key="reference@ba9876543210")
    assert claimed(a) == claimed(other) == 0
    assert other.submit(0, VALUES)
    assert scores.wait(0, [KEY], 0.05) is None
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(scores.wait(0, [KEY], 30)))
    waiting.start()
    assert a.submit(0, VALUES)
    waiting.join(20)
    assert found == [{KEY: VALUES}]


async def test_a_refused_score_and_a_lost_group_are_said_by_name(run: Run):
    await run.complete_groups(1)
    a, scores = queue(run, "a"), RedisGroupScores(run.redis, RUN)
    assert claimed(a) == 0
    a.refuse(0, "it is malformed")
    assert claimed(a) is None, "a refusal is final"
    with pytest.raises(ScoreRefusedError, match="reference: it is malformed"):
        scores.wait(0, [KEY], 0)
    run.redis.delete(f"{BufferKeys(RUN).root}:blobs:t:0")
    with pytest.raises(GroupLostError, match="group 0"):
        scores.wait(0, [KEY], 0)


async def test_a_group_that_needed_no_score_is_scored_under_other_filters(run: Run):
    """A run that is resumed with `zero_variance: train` has groups in its stream that the scorer skipped before."""
    await run.complete_groups(2)
    before, after = queue(run, "a", selection="mask"), queue(run, "a", selection="train")
    assert claimed(before) == 0
    before.skip(0)
    assert claimed(before) == 1
    assert before.submit(1, VALUES)
    assert (claimed(before), before.claim().num_missing) == (None, 0)
    with pytest.raises(ScoreRefusedError, match="reference: it needs none"):
        RedisGroupScores(run.redis, RUN, "mask").wait(0, [KEY], 0)
    scores = RedisGroupScores(run.redis, RUN, "train")
    assert scores.wait(0, [KEY], 0) is None
    assert claimed(after) == 0
    assert after.submit(0, VALUES)
    assert scores.wait(0, [KEY], 0) == {KEY: VALUES}
    assert claimed(after) is None, "a score holds under each selection"
    assert RedisGroupScores(run.redis, RUN, "mask").wait(0, [KEY], 0) == {KEY: VALUES}


async def test_an_undecodable_group_is_claimed_with_its_problem(run: Run):
    await run.complete_groups(1)
    run.overwrite_blob(0, 0, b"\x00")
    claim = queue(run, "a").claim().claimed
    assert claim is not None
    assert claim.group is None
    assert claim.problem


async def test_a_scorer_of_an_earlier_run_of_the_name_is_refused(run: Run):
    await run.complete_groups(1)
    with pytest.raises(ForeignRunError):
        RedisScoreQueue(run.redis, RUN, "another", "a", KEY, lease_s=1.0).claim()


async def test_a_new_group_wakes_an_idle_scorer(run: Run):
    a = queue(run, "a")
    assert claimed(a) is None
    await run.complete_groups(1)
    a.wait_for_group(30.0)
    assert claimed(a) == 0


@pytest.mark.parametrize("num_scored", [50, 3000])
async def test_a_claim_does_not_pass_over_groups_that_are_scored(run: Run, num_scored: int):
    """They stay in the stream until the checkpoint: a claim that reads them costs more with every step since."""
    a = queue(run, "a")
    add_scored_groups(run, num_scored)
    assert a.claim().num_missing == 0
    await run.complete_groups(1)
    run.redis.config_resetstat()
    assert a.claim().num_missing == 1
    assert count_commands(run) < 30


async def test_a_claim_does_not_pass_over_groups_that_wait(run: Run):
    await run.complete_groups(4)
    a = queue(run, "a")
    counts = []
    for number in range(4):
        run.redis.config_resetstat()
        claim = a.claim()
        counts.append(count_commands(run))
        assert claim.claimed is not None
        assert (claim.claimed.number, claim.num_missing) == (number, 4 - number)
        assert a.submit(number, VALUES)
    assert counts[1] == counts[2] == counts[3]


async def test_a_group_that_leaves_unscored_is_missing_no_more(run: Run):
    await run.complete_groups(3)
    a = queue(run, "a")
    assert a.claim().num_missing == 3
    first = run.learner.take(0)
    second = run.learner.take(0)
    assert first is not None
    assert second is not None
    run.learner.drop(first, "stale")
    run.learner.refill(second, "zero_variance", 1)
    claim = a.claim()
    assert claim.claimed is not None
    assert (claim.claimed.number, claim.num_missing) == (2, 1)


async def test_a_reconciled_group_is_scored_although_its_score_was_known(run: Run):
    """A group that was refilled needs no score, until a reconciliation finds that its step did not happen."""
    await run.complete_groups(1)
    taken = run.learner.take(0)
    assert taken is not None
    run.learner.refill(taken, "zero_variance", 1)
    assert claimed(queue(run, "a")) is None
    run.next_learner().reconcile(Proof(saved=[], step=0, num_trained=0, next_number=1))
    assert claimed(queue(run, "a")) == 0
