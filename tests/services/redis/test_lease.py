import threading
import time
from typing import cast

import pytest
from redis import Redis
from redis.exceptions import InvalidResponse

from offbeat.services.errors import FencedError, ForeignRunError, RetryableError
from offbeat.services.keys import RunKeys
from offbeat.services.redis import lease as lease_module
from offbeat.services.redis.connection import RETRY_CAP_S, connect
from offbeat.services.redis.lease import (
    LEASE_NONCE,
    RENEWALS_PER_TIMEOUT,
    LearnerLease,
    LeaseHeldError,
    free_lease_of,
)
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.slow

RUN = "run"
TIMEOUT_S = 3.0
"""Where the lease must live on: a busy machine may keep its renewing thread waiting for three quarters of this."""
RENEWED_S = TIMEOUT_S / RENEWALS_PER_TIMEOUT + RETRY_CAP_S
"""How long an expired lease is left to its holder, once Redis can be used again."""


def test_each_lease_has_a_greater_epoch(redis: Redis):
    epochs = []
    for _ in range(3):
        with LearnerLease(redis, RUN, "me", 10) as lease:
            epochs.append(lease.acquire())
            assert lease.held()
        assert not lease.held()
    assert epochs == [1, 2, 3]
    assert redis.get(RunKeys(RUN).lease) is None


def test_an_epoch_exceeds_those_that_an_emptied_redis_has_forgotten(redis: Redis):
    with LearnerLease(redis, RUN, "me", 10, newest_epoch=lambda: 7) as lease:
        assert lease.acquire() == 8
    with LearnerLease(redis, RUN, "me", 10, newest_epoch=lambda: 7) as lease:
        assert lease.acquire() == 9


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


def test_two_learners_of_the_same_name_are_distinguished(redis: Redis):
    with LearnerLease(redis, RUN, "me", 10) as one, LearnerLease(redis, RUN, "me", 10) as other:
        one.acquire()
        with pytest.raises(RetryableError):
            other.acquire()


def test_an_acquire_whose_answer_got_lost_gives_the_same_epoch(redis: Redis):
    with LearnerLease(redis, RUN, "me", 10) as lease:
        first = lease._call(lease._acquire, *lease._acquire_args)
        redis.delete(RunKeys(RUN).lease)  # what its expiry does
        again = lease._call(lease._acquire, *lease._acquire_args)
        assert lease.acquire() == again[1] == first[1] == 1


def somebody_waits(redis: Redis) -> bool:
    return "'cmd': 'xread'" in str(redis.client_list())


def test_a_waiting_learner_takes_over_as_soon_as_the_lease_is_released(redis: Redis):
    holder, waiting = LearnerLease(redis, RUN, "a", 60), LearnerLease(redis, RUN, "b", 60)
    holder.acquire()
    thread = threading.Thread(target=waiting.acquire, args=(30,))
    thread.start()
    wait_until_sync(lambda: somebody_waits(redis))
    holder.release()
    thread.join(25)
    assert not thread.is_alive()
    assert (waiting.held(), waiting.epoch) == (True, 2)
    waiting.release()


def dead_learner(redis: Redis, timeout_s: float) -> LearnerLease:
    """One that held the lease; its renewing thread dies with its process."""
    dead = LearnerLease(redis, RUN, "host:71", timeout_s)
    dead.acquire()
    dead._stop.set()
    return dead


def expired(redis: Redis) -> bool:
    return not redis.exists(RunKeys(RUN).lease)


def test_a_waiting_learner_takes_a_dead_ones_lease_at_expiry(redis: Redis):
    began = time.monotonic()
    dead = dead_learner(redis, 4.0)
    with LearnerLease(redis, RUN, "next", 12.0) as successor:
        wait_until_sync(lambda: _try(successor, wait_s=1.0))
        assert time.monotonic() - began < 4.0 + 12.0 / RENEWALS_PER_TIMEOUT + RETRY_CAP_S
        assert successor.epoch == 2
        assert not dead.held()
    dead.release()


def test_a_late_learner_gives_the_holder_time_to_renew(redis: Redis):
    """The lease had expired before it arrived."""
    began = time.time()
    holder = dead_learner(redis, TIMEOUT_S)
    acquired = time.time()
    wait_until_sync(lambda: expired(redis))
    with LearnerLease(redis, RUN, "a", TIMEOUT_S) as one, LearnerLease(redis, RUN, "b", TIMEOUT_S) as other:
        for waiting in (one, other, one):
            with pytest.raises(LeaseHeldError) as refused:
                waiting.acquire()
            assert refused.value.owner == "host:71"
            assert began - 1 <= refused.value.since <= acquired
        assert holder._call(holder._renew, holder._holder, holder._timeout_ms, 1)
        with pytest.raises(LeaseHeldError):
            one.acquire(wait_s=RENEWED_S)
        assert one.acquire(wait_s=60) == 2


def test_a_late_learner_takes_an_expired_lease_a_renewal_later(redis: Redis):
    dead_learner(redis, 0.3)
    wait_until_sync(lambda: expired(redis))
    began = time.monotonic()
    with LearnerLease(redis, RUN, "next", 8.0) as successor:
        assert successor.acquire(wait_s=60) == 2
        assert 8.0 / RENEWALS_PER_TIMEOUT + RETRY_CAP_S <= time.monotonic() - began + 0.01 < 8.0


@pytest.mark.parametrize("why", ["known to be dead", "fenced"])
def test_an_expired_lease_that_is_not_renewed_is_free_at_once(redis: Redis, why: str):
    dead_learner(redis, 0.3)
    wait_until_sync(lambda: expired(redis))
    with LearnerLease(redis, RUN, "next", 60) as successor:
        with pytest.raises(LeaseHeldError):
            successor.acquire()
        if why == "fenced":
            redis.incr(RunKeys(RUN).epoch)  # as for a run that is killed
        else:
            assert free_lease_of(redis, RUN, "host:71")
        assert successor.acquire() > 1


def test_a_released_lease_leaves_only_its_epoch_and_notification(redis: Redis):
    with LearnerLease(redis, RUN, "a", TIMEOUT_S) as holder, LearnerLease(redis, RUN, "b", TIMEOUT_S) as other:
        holder.acquire()
        with pytest.raises(LeaseHeldError):
            other.acquire()
        holder.release()
        assert other.acquire() == 2
    kept = {RunKeys(RUN).epoch.encode(), RunKeys(RUN).key("lease", "bell").encode()}
    wait_until_sync(lambda: set(cast(list[bytes], redis.keys())) == kept)


def test_only_the_lease_of_a_learner_known_dead_is_free_at_once(redis: Redis):
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
        wait_until_sync(lease.held)  # the process may have stood still until now
        assert lease.epoch == 1


def test_an_answer_that_is_not_redis_ends_no_renewal(redis: Redis, monkeypatch: pytest.MonkeyPatch):
    """As of another program at Redis' port, while Redis is away."""
    with LearnerLease(redis, RUN, "me", TIMEOUT_S) as lease:
        lease.acquire()
        answered = threading.Event()
        renew = lease._renew

        def answer_once(**arguments: object) -> object:
            if answered.is_set():
                return renew(**arguments)
            answered.set()
            raise InvalidResponse("Protocol Error: b'HTTP/1.1 400 Bad Request'")

        monkeypatch.setattr(lease, "_renew", answer_once)
        assert answered.wait(60)
        until = lease._valid_until
        wait_until_sync(lambda: lease._valid_until > until)


def test_a_replaced_learner_notices_and_cannot_retake_the_run(redis: Redis):
    heard = threading.Event()
    old = LearnerLease(redis, RUN, "old", 0.2, on_lost=heard.set)
    old.acquire()
    old.check()
    with LearnerLease(redis, RUN, "new", 10) as new:
        wait_until_sync(lambda: free_lease_of(redis, RUN, "old") and _try(new))  # it was taken for dead
        assert heard.wait(30)
        assert not old.held()
        with pytest.raises(FencedError):
            old.check()
        old.release()
        assert new.held()
        assert redis.get(RunKeys(RUN).lease) is not None


def _try(lease: LearnerLease, wait_s: float = 0.0) -> bool:
    try:
        lease.acquire(wait_s)
    except RetryableError:
        return False
    return True


def test_an_expired_lease_continues_if_no_learner_waits(redis: Redis):
    with LearnerLease(redis, RUN, "me", TIMEOUT_S) as lease:
        epoch = lease.acquire()
        redis.delete(RunKeys(RUN).lease)
        wait_until_sync(lambda: redis.get(RunKeys(RUN).lease) is not None)
        assert (lease.held(), lease.epoch) == (True, epoch)
        lease.check()


def test_a_redis_that_lost_its_data_gives_the_learner_its_lease_back(redis: Redis):
    keys = RunKeys(RUN)
    redis.set(keys.epoch, 6)
    with LearnerLease(redis, RUN, "me", TIMEOUT_S) as lease:
        assert lease.acquire() == 7
        redis.flushall()
        wait_until_sync(lambda: redis.get(keys.epoch) == b"7")
        lease.reclaim()
        assert lease.held()
        with pytest.raises(LeaseHeldError):
            LearnerLease(redis, RUN, "another", 10).acquire()


def test_in_a_redis_that_forgot_the_newest_lease_the_greater_epoch_wins(redis: Redis):
    """The older learner holds the lease again, as far as Redis knows."""
    with LearnerLease(redis, RUN, "old", 60.0) as old, LearnerLease(redis, RUN, "new", 60.0) as new:
        old.acquire()
        copy = redis.dump(RunKeys(RUN).lease), redis.dump(RunKeys(RUN).key("lease", "last"))
        assert free_lease_of(redis, RUN, "old")
        new.acquire()
        redis.set(RunKeys(RUN).epoch, old.epoch)
        for key, blob in zip((RunKeys(RUN).lease, RunKeys(RUN).key("lease", "last")), copy, strict=True):
            redis.restore(key, 0, blob, replace=True)  # type: ignore[arg-type]
        old.reclaim()
        new.reclaim()
        with pytest.raises(FencedError):
            old.reclaim()
        new.check()


def test_a_new_lease_exceeds_every_epoch_that_the_folder_knows(redis: Redis):
    with LearnerLease(redis, RUN, "me", 60.0, newest_epoch=lambda: 41) as lease:
        assert lease.acquire() == 42


def test_a_learner_of_another_run_of_that_name_gets_no_lease(redis: Redis):
    redis.hset(RunKeys(RUN).record, "uid", "new")
    with pytest.raises(ForeignRunError):
        LearnerLease(redis, RUN, "me", 60.0, run_uid="old").acquire()
    with LearnerLease(redis, RUN, "me", 60.0, run_uid="new") as lease:
        lease.acquire()
        redis.hset(RunKeys(RUN).record, "uid", "newest")
        with pytest.raises(FencedError):
            lease.reclaim()


def test_a_process_of_the_same_name_in_another_container_keeps_its_lease(redis: Redis, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(LEASE_NONCE, "there")
    with LearnerLease(redis, RUN, "host:7", 60.0) as lease:
        lease.acquire()
        assert not free_lease_of(redis, RUN, "host:7", "here")
        assert lease.held()
        assert free_lease_of(redis, RUN, "host:7", "there")


def test_a_redis_that_is_away_gives_no_lease_and_says_try_again():
    nowhere = connect("redis://127.0.0.1:1/0", patience_s=0.0)
    with LearnerLease(nowhere, RUN, "me", 0.2) as lease, pytest.raises(RetryableError):
        lease.acquire()


def test_a_read_only_redis_ends_no_lease_and_renewal_continues(redis_url: str):
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


def test_a_long_read_only_redis_leaves_the_lease_to_its_holder(redis_url: str, monkeypatch: pytest.MonkeyPatch):
    """The one that waits asks more often than the holder, whose patience is over."""
    monkeypatch.setattr(lease_module, "RETRY_CAP_S", 5.0)  # a busy machine may keep the renewing thread waiting
    over = threading.Event()
    with (
        connect(redis_url, patience_s=0.05) as redis,
        connect(redis_url, patience_s=60.0) as others,
        Redis.from_url(redis_url) as raw,
        LearnerLease(redis, RUN, "holder", TIMEOUT_S) as holder,
        LearnerLease(others, RUN, "standby", TIMEOUT_S) as standby,
    ):
        epoch = holder.acquire()

        def waits() -> None:
            while not over.is_set() and not _try(standby, wait_s=1.0):
                pass

        thread = threading.Thread(target=waits)
        thread.start()
        try:
            for _ in range(4):
                wait_until_sync(lambda: somebody_waits(raw) and holder.held())
                raw.config_set("maxmemory", "1")
                wait_until_sync(lambda: expired(raw) and not holder.held())
                raw.config_set("maxmemory", "0")
                wait_until_sync(lambda: not expired(raw))
                assert cast(bytes, raw.get(RunKeys(RUN).lease)).startswith(b"holder ")
            wait_until_sync(holder.held)
            assert (holder.epoch, raw.get(RunKeys(RUN).epoch)) == (epoch, str(epoch).encode())
        finally:
            raw.config_set("maxmemory", "0")
            over.set()
            thread.join(60)
        assert not standby.held()
