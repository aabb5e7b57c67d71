import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from redis import Redis

from offbeat.services import jsonl
from offbeat.services.buffer import scripts
from offbeat.services.buffer.api import Proof
from offbeat.services.redis.connection import connect
from offbeat.trainer.learner.checkpointing import Checkpointer
from offbeat.trainer.learner.loop import Learner
from offbeat.trainer.learner.step_ledger import StepLedger
from offbeat.trainer.training import checkpoint_store
from offbeat.trainer.training.checkpoint import LearnerState, ListedCheckpoint
from offbeat.trainer.training.fenced_folder import FencedFolder
from tests.copying import replace
from tests.simulation.machine import Protocol
from tests.simulation.walk import SimulationError, draw, simulate
from tests.simulation.whole_learner import FAULTS, BrokenLifeError, live

pytestmark = pytest.mark.slow

NUM_SEEDS = 40
BUDGET_S = 60.0
"""Time after which the remaining seeds are left out; 12 at least are played."""
MIN_SEEDS = 12


def simulate_all(redis: Redis, url: str, seeds: Sequence[int], *, shorten_s: float = 0.0) -> None:
    for seed in seeds:
        simulate(redis, url, seed, shorten_s=shorten_s)


@pytest.mark.timeout(600)  # a failure is shrunk to few steps, which takes its time
def test_nothing_is_lost_and_nothing_trained_twice_whatever_dies_when(redis_url: str):
    with connect(redis_url) as redis:
        machine = type("OnRedis", (Protocol,), {"redis": redis, "url": redis_url})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=int(os.environ.get("OFFBEAT_PROTOCOL_EXAMPLES", "60")),
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
            ),
        )


@pytest.mark.timeout(600)
def test_long_lives_full_of_deaths_end_complete(redis_url: str):
    """Fixed seeds, which get further into a run than hypothesis does."""
    ends_at = time.monotonic() + BUDGET_S
    with connect(redis_url) as redis:
        for seed in range(NUM_SEEDS):
            if seed >= MIN_SEEDS and time.monotonic() > ends_at:
                break
            simulate(redis, redis_url, seed)


def test_a_seed_gives_the_same_life_again(redis_url: str):
    with connect(redis_url) as redis:
        assert simulate(redis, redis_url, 3) == simulate(redis, redis_url, 3)
    assert draw(3) == draw(3) != draw(4)


# Guards that are broken on purpose


def break_script_fencing(patch: pytest.MonkeyPatch) -> None:
    """Let each script accept the epoch of a replaced learner."""
    source, guard = scripts.script_source, "return redis.call('GET', EPOCH) ~= epoch end"
    assert guard in source("take")
    patch.setattr(scripts, "script_source", lambda name: source(name).replace(guard, "return false end"))
    scripts.script_digest.cache_clear()


def break_proof(patch: pytest.MonkeyPatch) -> None:
    """Reconcile a Redis that forgot without what the checkpoints have trained."""
    prove = StepLedger.prove

    def prove_nothing(
        self: StepLedger, step: int, num_trained: int, next_number: int, entry_ids: Sequence[str] = ()
    ) -> Proof:
        return replace(prove(self, step, num_trained, next_number, entry_ids), saved=[])

    patch.setattr(StepLedger, "prove", prove_nothing)


def break_marks_of_samples(patch: pytest.MonkeyPatch) -> None:
    """Keep the rewards of answers that Redis has lost."""
    source, guard = scripts.script_source, "if scoring and scoring ~= mark then"
    assert guard in source("score_group")
    patch.setattr(scripts, "script_source", lambda name: source(name).replace(guard, "if false then"))
    scripts.script_digest.cache_clear()


def break_folder_fencing(patch: pytest.MonkeyPatch) -> None:
    """Let a replaced learner write checkpoints: its epoch's folder is made again where a successor has removed it."""

    def publish(self: FencedFolder, staged: str | Path, name: str) -> Path:
        self._own.mkdir(exist_ok=True)
        (self._own / staged).replace(self.path / name)
        return self.path / name

    def stage(self: FencedFolder, source: Path, name: str) -> None:
        self._own.mkdir(exist_ok=True)
        source.rename(self._own / name)

    patch.setattr(FencedFolder, "check", lambda _self: None)
    patch.setattr(FencedFolder, "stage", stage)
    patch.setattr(FencedFolder, "publish", publish)


def break_digests(patch: pytest.MonkeyPatch) -> None:
    """Publish a checkpoint before it is whole."""

    def in_place(self: checkpoint_store.CheckpointStore, temporary: Path, new: ListedCheckpoint) -> Path:
        target = self._folder / new.name
        temporary.rename(target)
        return target

    patch.setattr(checkpoint_store.CheckpointStore, "_make_durable", in_place)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "broken", [break_script_fencing, break_proof, break_marks_of_samples, break_folder_fencing, break_digests]
)
def test_a_broken_guard_is_found(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None]
):
    broken(monkeypatch)
    try:
        with connect(redis_url) as redis, pytest.raises(SimulationError, match="replay: make simulate ARGS='--seed"):
            simulate_all(redis, redis_url, range(NUM_SEEDS))
    finally:
        scripts.script_digest.cache_clear()


# Whole learners


def live_all(redis: Redis, url: str, seeds: Sequence[int]) -> None:
    for seed in seeds:
        live(redis, url, seed)


@pytest.mark.timeout(600)
def test_whole_learners_lose_nothing_and_train_nothing_twice(redis_url: str):
    ends_at = time.monotonic() + BUDGET_S
    happened = Counter[str]()
    with connect(redis_url) as redis:
        for seed in range(NUM_SEEDS):
            if seed >= MIN_SEEDS and time.monotonic() > ends_at:
                break
            happened += live(redis, redis_url, seed)
        assert set(happened) == {"lives", *FAULTS}
        assert live(redis, redis_url, 3) == live(redis, redis_url, 3)


def test_other_threads_do_not_advance_the_time_of_learners(redis_url: str):
    has_ended = threading.Event()

    def wait() -> None:
        while not has_ended.is_set():
            time.sleep(0.001)

    with connect(redis_url) as redis:
        alone = live(redis, redis_url, 3)
        thread = threading.Thread(target=wait)
        thread.start()
        try:
            assert live(redis, redis_url, 3) == alone
        finally:
            has_ended.set()
            thread.join()


def break_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    """Acknowledge groups before their checkpoint is durable."""
    begin = Checkpointer.begin

    def begin_and_acknowledge(self: Checkpointer, state: LearnerState, write: Callable[[Path], None]) -> None:
        self._buffer.ack(tuple(self._consumed), state.step)
        begin(self, state, write)

    patch.setattr(Checkpointer, "begin", begin_and_acknowledge)


def break_synced_checkpoints(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint_store, "sync_tree", lambda _folder: None)


def break_synced_journal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepLedger, "sync", lambda _self: None)


def break_synced_entries(patch: pytest.MonkeyPatch) -> None:
    """Sync the journal's lines, but not its entry in its folder."""
    patch.setattr(jsonl, "sync_folder", lambda _folder: None)


def break_publication(patch: pytest.MonkeyPatch) -> None:
    """Count an announcement that met a Redis that forgot as done."""
    patch.setattr(
        Learner, "_after_reconciliation", lambda self, result: self._ledger.write_reconciled(self._step, result)
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "broken",
    [
        break_acknowledgement,
        break_synced_checkpoints,
        break_synced_journal,
        break_synced_entries,
        break_publication,
    ],
)
def test_a_broken_guard_of_whole_learners_is_found(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None]
):
    broken(monkeypatch)
    try:
        with connect(redis_url) as redis, pytest.raises(BrokenLifeError, match=r"seed \d+ of whole learners"):
            live_all(redis, redis_url, range(3 * NUM_SEEDS))
    finally:
        scripts.script_digest.cache_clear()


def test_a_failing_seed_is_reported_with_the_events_that_it_takes(redis_url: str, monkeypatch: pytest.MonkeyPatch):
    break_folder_fencing(monkeypatch)
    with connect(redis_url) as redis, pytest.raises(SimulationError) as failure:
        simulate_all(redis, redis_url, range(NUM_SEEDS), shorten_s=20.0)
    assert len(failure.value.events) <= 8
    assert any("learner" in event.name for event in failure.value.events)
