import threading
import time
from collections.abc import Iterator

import pytest
from redis import Redis

from services.buffer.connection import connect
from services.errors import FencedError, RetryableError
from services.keys import RunKeys
from services.lease import LearnerLease, LeaseHeldError, free_lease_of
from tests.waiting import wait_until_sync

RUN = "run"
TIMEOUT_S = 3.0
"""Where the lease must live on: a busy machine may keep its renewing thread waiting for three quarters of this."""


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with connect(redis_url) as client:
        yield client


def test_each_lease_has_a_greater_epoch(redis: Redis):
    epochs = []
    for _ in range(3):
        with LearnerLease(redis, RUN, "me", 10) as lease:
            epochs.append(lease.acquire())
            assert lease.held()
        assert not lease.held()
    assert epochs == [1, 2, 3]
    assert redis.get(RunKeys(RUN).lease) is None


def test_runs_have_leases_of_their_own(redis: Redis):
    with LearnerLease(redis, "a", "me", 10) as one, LearnerLease(redis, "b", "me", 10) as other:
        assert (one.acquire(), other.acquire()) == (1, 1)


def test_a_held_lease_is_not_given_to_another(redis: Redis):
    with LearnerLease(redis, RUN, "host-1 pid 7", 10) as holder, LearnerLease(redis, RUN, "me", 10) as other:
        holder.acquire()
        with pytest.raises(RetryableError, match="host-1 pid 7"):
            other.acquire(wait_s=0.05)
        assert not other.held()
        with pytest.raises(FencedError):
            _ = other.epoch


def test_who_waits_learns_who_holds_the_lease_and_since_when(redis: Redis):
    began = time.time()
    with LearnerLease(redis, RUN, "host-1:7", 10) as holder, LearnerLease(redis, RUN, "me", 10) as other:
        holder.acquire()
        with pytest.raises(LeaseHeldError) as refused:
            other.acquire()
        assert refused.value.owner == "host-1:7"
        assert began - 1 <= refused.value.since <= time.time()
        holder.release()
        other.acquire()
        with pytest.raises(LeaseHeldError) as refused:
            holder.acquire()
        assert refused.value.owner == "me"


def test_two_learners_of_the_same_name_are_told_apart(redis: Redis):
    with LearnerLease(redis, RUN, "me", 10) as one, LearnerLease(redis, RUN, "me", 10) as other:
        one.acquire()
        with pytest.raises(RetryableError):
            other.acquire()


def test_an_acquire_whose_answer_got_lost_gives_the_same_epoch(redis: Redis):
    with LearnerLease(redis, RUN, "me", 10) as lease:
        first = lease._call(lease._acquire, lease._holder, 10_000)
        assert lease.acquire() == first[1] == 1


def test_a_waiting_learner_takes_over_as_soon_as_the_lease_is_released(redis: Redis):
    holder, waiting = LearnerLease(redis, RUN, "a", 60), LearnerLease(redis, RUN, "b", 60)
    holder.acquire()
    thread = threading.Thread(target=waiting.acquire, args=(30,))
    thread.start()
    wait_until_sync(lambda: "'cmd': 'xread'" in str(redis.client_list()))
    holder.release()
    thread.join(25)
    assert not thread.is_alive()
    assert (waiting.held(), waiting.epoch) == (True, 2)
    waiting.release()


def test_a_dead_learners_lease_expires(redis: Redis):
    dead = LearnerLease(redis, RUN, "dead", 0.3)
    dead.acquire()
    dead._stop.set()  # its renewing thread dies with its process
    started = time.monotonic()
    with LearnerLease(redis, RUN, "next", 10) as successor:
        assert successor.acquire(wait_s=10) == 2
        assert time.monotonic() - started < 5
        assert not dead.held()
    dead.release()


def test_the_lease_of_a_learner_that_is_known_to_be_dead_is_free_at_once_and_nobody_elses(redis: Redis):
    with LearnerLease(redis, RUN, "host:71", 600) as dead, LearnerLease(redis, RUN, "me", 10) as other:
        dead.acquire()
        assert not free_lease_of(redis, RUN, "host:7")
        with pytest.raises(LeaseHeldError):
            other.acquire()
        assert free_lease_of(redis, RUN, "host:71")
        assert other.acquire() == 2
        assert not free_lease_of(redis, RUN, "host:71")
        assert other.held()


def test_a_living_learner_keeps_its_lease_past_the_timeout(redis: Redis):
    with LearnerLease(redis, RUN, "a", TIMEOUT_S) as lease, LearnerLease(redis, RUN, "b", TIMEOUT_S) as other:
        lease.acquire()
        with pytest.raises(RetryableError):
            other.acquire(wait_s=1.5 * TIMEOUT_S)
        assert lease.held()


def test_a_learner_that_was_replaced_hears_of_it_and_cannot_take_the_run_back(redis: Redis):
    heard = threading.Event()
    old = LearnerLease(redis, RUN, "old", 0.2, on_lost=heard.set)
    old.acquire()
    old.check()
    redis.delete(RunKeys(RUN).lease)  # it was stopped for long, say, and its lease expired
    with LearnerLease(redis, RUN, "new", 10) as new:
        wait_until_sync(lambda: _try(new))
        assert heard.wait(30)
        assert not old.held()
        with pytest.raises(FencedError):
            old.check()
        old.release()
        assert new.held()
        assert redis.get(RunKeys(RUN).lease) is not None


def _try(lease: LearnerLease) -> bool:
    try:
        lease.acquire()
    except RetryableError:
        return False
    return True


def test_a_lease_that_expired_with_nobody_waiting_goes_on(redis: Redis):
    with LearnerLease(redis, RUN, "me", TIMEOUT_S) as lease:
        epoch = lease.acquire()
        redis.delete(RunKeys(RUN).lease)
        wait_until_sync(lambda: redis.get(RunKeys(RUN).lease) is not None)
        assert (lease.held(), lease.epoch) == (True, epoch)
        lease.check()


def test_a_redis_that_lost_its_data_fences_the_learner(redis: Redis):
    heard = threading.Event()
    with LearnerLease(redis, RUN, "me", 0.2, on_lost=heard.set) as lease:
        lease.acquire()
        redis.flushall()
        assert heard.wait(30)
        assert not lease.held()


def test_a_redis_that_is_away_gives_no_lease_and_says_try_again():
    nowhere = connect("redis://127.0.0.1:1/0", patience_s=0.0)
    with LearnerLease(nowhere, RUN, "me", 0.2) as lease, pytest.raises(RetryableError):
        lease.acquire()


def test_a_redis_that_refuses_writes_ends_no_lease_and_the_renewing_thread_lives_on(redis_url: str):
    with connect(redis_url, patience_s=0.05) as redis, Redis.from_url(redis_url) as other:
        lost = threading.Event()
        with LearnerLease(redis, RUN, "me", 0.4, on_lost=lost.set) as lease:
            lease.acquire()
            other.config_set("maxmemory", "1")
            try:
                wait_until_sync(lambda: not other.exists(RunKeys(RUN).lease))
                with pytest.raises(RetryableError, match=r"^Redis refuses writes: OOM"):
                    LearnerLease(redis, RUN, "another", 10).acquire()
            finally:
                other.config_set("maxmemory", "0")
            wait_until_sync(lambda: bool(other.exists(RunKeys(RUN).lease)) and lease.held())
            assert not lost.is_set()
