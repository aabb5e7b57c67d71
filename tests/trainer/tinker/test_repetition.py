"""What a learner repeats is what was acknowledged, whatever failed, was deleted or was lost by Redis meanwhile."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from offbeat.services.tinker.audit import find_problems
from offbeat.services.tinker.records import (
    CreateModel,
    OptimStep,
    Result,
    SaveWeights,
    encode_command,
    request_id_of,
)
from offbeat.trainer.tinker import learner
from offbeat.trainer.tinker.adapters import AdapterPool
from tests.trainer.tinker.test_learner import KilledError, StoppingLog, encode_request, read_evidence, run, send
from tests.trainer.tinker.tiny_base import make_data
from tests.waiting import wait_until_sync

BATCH = encode_request(make_data(("weights",)))
STEP = OptimStep(learning_rate=1e-2)


@pytest.fixture
def failures(pool: AdapterPool, monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Errors of the next passes of the model."""
    errors, logits = list[BaseException](), pool.logits

    def compute(*args: Any) -> Any:
        if errors:
            raise errors.pop()
        return logits(*args)

    monkeypatch.setattr(pool, "logits", compute)
    return errors


def test_a_command_that_was_refused_is_refused_again(
    redis: Redis, pool: AdapterPool, tmp_path: Path, failures: list[BaseException]
) -> None:
    """Memory was full for a moment, so its client has sent the batch again."""
    failures.append(MemoryError("full"))
    send(redis, "a", [CreateModel(), BATCH, BATCH, STEP, STEP])
    with pytest.raises(KilledError):
        run(StoppingLog(redis, 3), pool, tmp_path / "server")
    run(log := StoppingLog(redis), pool, tmp_path / "server")
    evidence = read_evidence(log, redis, "a")
    assert [each.is_refused for _, each in sorted(evidence.commands.items())] == [False, True, False, False, True]
    assert evidence.steps[3].num_sequences == 3
    assert find_problems(evidence) == []


def test_a_refused_save_is_not_repeated_once_its_name_is_free(redis: Redis, pool: AdapterPool, tmp_path: Path) -> None:
    """No record would have the folder."""
    send(redis, "a", [CreateModel(), SaveWeights("x"), SaveWeights("x"), BATCH])
    with pytest.raises(KilledError):
        run(log := StoppingLog(redis, 3), pool, tmp_path / "server")
    redis.hdel(log.keys.checkpoints, "tinker://a/weights/x")
    run(log := StoppingLog(redis), pool, tmp_path / "server")
    assert log.applied("a") == 3
    assert {each.name for each in (tmp_path / "server/checkpoints/a/weights").iterdir()} == {"x@1"}


def test_a_refused_step_clears_its_gradient_again(redis: Redis, pool: AdapterPool, tmp_path: Path) -> None:
    """As it is not finite."""
    data = make_data(("weights",))
    for datum in data:
        datum.inputs["weights"][:] = 3e38
    send(redis, "a", [CreateModel(), encode_request(data), STEP, BATCH, STEP])
    with pytest.raises(KilledError):
        run(log := StoppingLog(redis, 3), pool, tmp_path / "server")
    assert read_evidence(log, redis, "a").commands[2].is_refused
    run(log := StoppingLog(redis), pool, tmp_path / "server")
    evidence = read_evidence(log, redis, "a")
    assert (evidence.diverged, find_problems(evidence)) == ({}, [])
    assert evidence.steps[4].num_sequences == 3


def test_a_command_that_was_applied_is_not_left_out(
    redis: Redis, pool: AdapterPool, tmp_path: Path, failures: list[BaseException]
) -> None:
    """The successor dies of what may pass, and the next one repeats the command."""
    send(redis, "a", [CreateModel(), BATCH, STEP])
    with pytest.raises(KilledError):
        run(log := StoppingLog(redis, 2), pool, tmp_path / "server")
    stored = redis.get(log.keys.result(request_id_of("a", 1)))
    failures.append(MemoryError("full"))
    with pytest.raises(MemoryError):
        run(StoppingLog(redis), pool, tmp_path / "server")
    run(log := StoppingLog(redis), pool, tmp_path / "server")
    assert [result.encode() for _, seq_id, result in log.repeated if seq_id == 1] == [stored]
    assert find_problems(read_evidence(log, redis, "a")) == []


def test_a_repetition_that_keeps_failing_is_left_out(
    redis: Redis,
    pool: AdapterPool,
    tmp_path: Path,
    failures: list[BaseException],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The audit has it, and learners do not die of the model's next commands, too."""
    send(redis, "a", [CreateModel(), BATCH, BATCH, STEP])
    with pytest.raises(KilledError):
        run(StoppingLog(redis, 3), pool, tmp_path / "server")
    for _ in range(learner.MAX_DEATHS):
        failures.append(RuntimeError("no memory"))
        with pytest.raises(RuntimeError, match="no memory"):
            run(StoppingLog(redis), pool, tmp_path / "server")
    assert "command 1 (forward_backward) of model a failed" in caplog.text
    failures.append(RuntimeError("no memory"))  # of command 2
    run(log := StoppingLog(redis), pool, tmp_path / "server")
    assert failures == []
    assert read_evidence(log, redis, "a").diverged.keys() == {1}
    assert log.applied("a") == 3
    assert not redis.exists(log.keys.deaths)


def test_a_repeated_save_leaves_the_files_that_clients_read(redis: Redis, pool: AdapterPool, tmp_path: Path) -> None:
    send(redis, "a", [CreateModel(), SaveWeights("x"), BATCH])
    with pytest.raises(KilledError):
        run(StoppingLog(redis, 2), pool, tmp_path / "server")
    folder = tmp_path / "server/checkpoints/a/weights/x@1"
    inodes = {each.name: each.stat().st_ino for each in folder.iterdir()}
    run(log := StoppingLog(redis), pool, tmp_path / "server")
    assert [seq_id for _, seq_id, _ in log.repeated] == [0, 1]
    assert {each.name: each.stat().st_ino for each in folder.iterdir()} == inodes


def test_a_command_of_which_learners_die_is_refused(
    redis: Redis, pool: AdapterPool, tmp_path: Path, failures: list[BaseException]
) -> None:
    """For want of memory, say: that of another model, which shared its first pass, is not."""
    for model_id in "ab":
        send(redis, model_id, [CreateModel(), BATCH])
    for _ in range(learner.MAX_DEATHS):
        failures.append(SystemExit())
        with pytest.raises(SystemExit):
            run(StoppingLog(redis), pool, tmp_path / "server")
    run(log := StoppingLog(redis), pool, tmp_path / "server")
    assert [read_evidence(log, redis, each).commands[1].is_refused for each in "ab"] == [True, False]
    answer: Any = redis.get(log.keys.result(request_id_of("a", 1)))
    assert Result.decode(answer) == Result.of_error(learner.DEADLY)
    assert not redis.exists(log.keys.deaths)


def test_a_kill_of_a_learner_that_was_stopped_is_no_death_of_its_command(
    redis: Redis, pool: AdapterPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long one is killed a minute after each stop of the server."""
    send(redis, "a", [CreateModel(), BATCH])

    def stop_and_die(*_: object) -> None:
        assert log.learner is not None
        log.learner.stop_by_signal()
        wait_until_sync(lambda: not redis.exists(log.keys.activity))
        raise SystemExit

    for _ in range(learner.MAX_DEATHS):
        log = StoppingLog(redis)
        with monkeypatch.context() as patched:
            patched.setattr(pool, "logits", stop_and_die)
            with pytest.raises(SystemExit):
                run(log, pool, tmp_path / "server")
    run(log := StoppingLog(redis), pool, tmp_path / "server")
    assert not read_evidence(log, redis, "a").commands[1].is_refused


class RewindingLog(StoppingLog):
    """Log that loses what Redis has of the last command, once all are applied, as in a power loss."""

    def __init__(self, redis: Redis, lose: Callable[[], object]) -> None:
        super().__init__(redis)
        self._lose = [lose]

    def wait(self, timeout_s: float) -> set[str]:
        if self._lose:
            self._lose.pop()()
        return super().wait(timeout_s) if self.applied("a") == 2 else set()


@pytest.mark.parametrize(
    ("save_interval_s", "has_command"),
    [(20.0, True), (0.0, True), (0.0, False)],
    ids=["its state is older", "its state has it", "the command is lost, too"],
)
def test_a_result_that_redis_has_lost_is_made_again_or_an_error(
    redis: Redis,
    pool: AdapterPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    save_interval_s: float,
    has_command: bool,
) -> None:
    """A client that waits for it gets an answer, and the model goes on."""
    monkeypatch.setattr(learner, "TIDY_INTERVAL_S", 0.1)
    monkeypatch.setattr(learner, "SAVE_INTERVAL_S", save_interval_s)
    results = list[Any]()

    def lose() -> None:
        keys = log.keys
        results.append(redis.get(keys.result(request_id_of("a", 2))))
        if has_command:
            redis.hset(keys.log("a"), "2", encode_command(BATCH))
        redis.hset(keys.applied, "a", 1)
        redis.hdel(keys.applied_commands("a"), "2")
        redis.delete(keys.result(request_id_of("a", 2)))

    log = RewindingLog(redis, lose)
    send(redis, "a", [CreateModel(), BATCH, BATCH])
    run(log, pool, tmp_path / "server")
    again: Any = redis.get(log.keys.result(request_id_of("a", 2)))
    if save_interval_s:
        assert again == results[0]
    else:
        assert Result.decode(again) == Result.of_error(learner.LOST_RESULT, "server")
    assert (log.applied("a"), log.logged("a")) == (2, [])
    send(redis, "a", [STEP], first=3)
    run(log := StoppingLog(redis), pool, tmp_path / "server")
    evidence = read_evidence(log, redis, "a")
    assert evidence.steps[3].num_sequences == 6
    assert (find_problems(evidence) == []) == bool(save_interval_s)
