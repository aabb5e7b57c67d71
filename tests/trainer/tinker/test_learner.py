"""The learner's loop on a real Redis: a successor repeats what has results as it was computed, shared passes too."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from redis import Redis

from offbeat.services.tinker.audit import CommandEvidence, find_problems
from offbeat.services.tinker.log import CommandLog
from offbeat.services.tinker.records import (
    AppliedCommand,
    Command,
    CreateModel,
    ForwardBackwardCommand,
    LearnerActivity,
    LoadWeights,
    Lora,
    ModelRecord,
    OptimStep,
    RefusedCommand,
    Result,
    SaveWeights,
    SharedPass,
    StepMetrics,
    encode_command,
    request_id_of,
)
from offbeat.services.tinker.wire import CLASSES, FLOAT32, INT64, Datum
from offbeat.trainer.tinker.adapters import AdapterPool
from offbeat.trainer.tinker.executor import Executor, ExecutorLimits, QueuedCommand
from offbeat.trainer.tinker.folders import TinkerFolder
from offbeat.trainer.tinker.learner import TinkerLearner
from offbeat.trainer.tinker.losses import check_datum
from tests.trainer.tinker.tiny_base import make_data

MODELS = {
    "a": (Lora(rank=4, seed=1), (5, 3, 7)),
    "b": (Lora(rank=2, seed=2, train_mlp=False), (31,)),
    "c": (Lora(rank=8, seed=3, train_unembed=False), (2, 17, 4, 9, 3)),
}
STEPS = 2
NUM_COMMANDS = 3 * (1 + 3 * STEPS)
LIMITS = ExecutorLimits(context=64, max_tokens=1000, max_models=4)


RecordT = TypeVar("RecordT", AppliedCommand, StepMetrics)


class KilledError(Exception):
    pass


class StoppingLog(CommandLog):
    """Log that ends its learner when no command is left, or with an error before a result is stored."""

    def __init__(self, redis: Redis, survives: int = NUM_COMMANDS) -> None:
        super().__init__(redis, "test")
        self.learner: TinkerLearner | None = None
        self.repeated: list[tuple[str, int, Result]] = []
        self._survives = survives

    def wait(self, timeout_s: float) -> set[str]:  # noqa: ARG002
        assert self.learner is not None
        self.learner.stop()
        return set()

    def commit(self, model_id: str, owner: str, seq_id: int, result: Result, *rest: Any) -> bool:
        if seq_id <= self.applied(model_id):
            self.repeated.append((model_id, seq_id, result))
        elif not self._survives:
            raise KilledError
        else:
            self._survives -= 1
        return super().commit(model_id, owner, seq_id, result, *rest)


def encode_request(data: Sequence[Datum]) -> ForwardBackwardCommand:
    message = CLASSES["ForwardBackwardRequest"](loss_fn="cross_entropy")
    for datum in data:
        added = message.data.add()
        added.model_input.add().encoded_text.tokens = datum.tokens.astype("<i4").tobytes()
        for name, values in datum.inputs.items():
            tensor = added.loss_fn_inputs.add(key=name).value
            is_float = values.dtype.kind == "f"
            tensor.dense = values.astype("<f4" if is_float else "<i8").tobytes()
            tensor.dtype = FLOAT32 if is_float else INT64
    return ForwardBackwardCommand(message.SerializeToString())


def commands(lengths: Sequence[int], seed: int) -> list[Command]:
    sent: list[Command] = [CreateModel()]
    for step in range(STEPS):
        sent += [encode_request(make_data(("weights",), lengths, seed=100 * seed + 10 * step + i)) for i in range(2)]
        sent.append(OptimStep(learning_rate=1e-2))
    return sent


def submit(redis: Redis) -> None:
    keys = CommandLog(redis, "test").keys
    for seed, (model_id, (lora, lengths)) in enumerate(MODELS.items()):
        record = ModelRecord(owner="owner", session_id="session", created_at=0.0, lora=lora)
        redis.hset(keys.models, model_id, record.encode())
        for seq_id, command in enumerate(commands(lengths, seed)):
            redis.hset(keys.log(model_id), str(seq_id), encode_command(command))


def send(redis: Redis, model_id: str, sent: Sequence[Command], first: int = 0) -> None:
    """Append commands to the log of a model, which is new if they are the first."""
    keys = CommandLog(redis, "test").keys
    record = ModelRecord(owner="owner", session_id="session", created_at=0.0, lora=Lora(rank=2, seed=1))
    redis.hsetnx(keys.models, model_id, record.encode())  # type: ignore[arg-type]
    for seq_id, command in enumerate(sent, first):
        redis.hset(keys.log(model_id), str(seq_id), encode_command(command))


def run(
    log: StoppingLog, pool: AdapterPool, folder: Path, shared_pass_tokens: int = 500, limits: ExecutorLimits = LIMITS
) -> None:
    executor = Executor(pool, log, TinkerFolder(folder), limits)
    log.learner = TinkerLearner(log, executor, shared_pass_tokens)
    try:
        log.learner.run()
    finally:
        executor.discard([])


def results(log: CommandLog, redis: Redis) -> dict[str, bytes | None]:
    ids = [request_id_of(model_id, seq_id) for model_id in MODELS for seq_id in range(NUM_COMMANDS // len(MODELS))]
    stored = {each: redis.get(log.keys.result(each)) for each in ids}
    return {each: data if isinstance(data, bytes) else None for each, data in stored.items()}


def problems(log: CommandLog, redis: Redis, model_id: str) -> list[str]:
    """Return what the audit finds of a model of `submit`."""
    evidence = read_evidence(log, redis, model_id)
    assert (len(evidence.commands), len(evidence.steps)) == (NUM_COMMANDS // len(MODELS), STEPS)
    return find_problems(evidence)


def read_evidence(log: CommandLog, redis: Redis, model_id: str) -> CommandEvidence:
    applied = read(redis, log.keys.applied_commands(model_id), AppliedCommand)
    steps = read(redis, log.keys.metrics(model_id), StepMetrics)
    diverged = read(redis, log.keys.diverged_commands(model_id), AppliedCommand)
    return CommandEvidence(log.applied(model_id), applied, steps, {}, diverged=diverged)


def read(redis: Any, key: str, kind: type[RecordT]) -> dict[int, RecordT]:
    return {int(field): msgspec.json.decode(data, type=kind) for field, data in redis.hgetall(key).items()}


@pytest.mark.parametrize("survives", [4, 5, 8, 11, 16])
def test_a_successor_repeats_results_to_the_bit(redis: Redis, pool: AdapterPool, tmp_path: Path, survives: int) -> None:
    """A learner dies before any of the results, also between those of one pass."""
    submit(redis)
    with pytest.raises(KilledError):
        run(StoppingLog(redis, survives), pool, tmp_path / "server")
    stored = results(log := StoppingLog(redis), redis)
    assert sum(each is not None for each in stored.values()) == survives
    run(log, pool, tmp_path / "server")
    assert len(log.repeated) == survives
    for model_id, seq_id, result in log.repeated:
        assert result.encode() == stored[request_id_of(model_id, seq_id)]
    assert all(results(log, redis).values())
    assert [each for model_id in MODELS for each in problems(log, redis, model_id)] == []
    assert not any(redis.exists(log.keys.log(each), log.keys.shared_passes(each)) for each in MODELS)


def test_a_gradient_that_is_added_twice_is_found(redis: Redis, pool: AdapterPool, tmp_path: Path) -> None:
    """A learner that forgets what its predecessor has saved."""
    submit(redis)
    with pytest.raises(KilledError):
        run(log := StoppingLog(redis, 5), pool, tmp_path / "server", shared_pass_tokens=0)
    executor = Executor(pool, log, TinkerFolder(tmp_path / "server"), LIMITS)
    for seq_id in (0, 1, 1):
        data = log.command("a", seq_id)
        assert data is not None
        executor.apply(QueuedCommand("a", log.model("a"), seq_id, data))
    executor.save("a")
    run(log := StoppingLog(redis), pool, tmp_path / "server", shared_pass_tokens=0)
    assert any(
        "command 2 (forward_backward) left version 0 and a gradient of 9" in each for each in problems(log, redis, "a")
    )
    assert problems(log, redis, "b") == []


def test_a_model_on_disk_that_refused_a_command_takes_later_ones(
    redis: Redis, pool: AdapterPool, tmp_path: Path
) -> None:
    """The state of `a` is of its first command: `b` has its place in memory, and a refusal needs no model."""
    limits = replace(LIMITS, max_models=1)
    send(redis, "a", [CreateModel(), RefusedCommand("bad name")])
    send(redis, "b", [CreateModel()])
    run(StoppingLog(redis), pool, tmp_path / "server", limits=limits)
    send(redis, "a", [encode_request(make_data(("weights",)))], first=2)
    run(log := StoppingLog(redis), pool, tmp_path / "server", limits=limits)
    assert log.applied("a") == 2
    assert log.logged("a") == []


def test_a_successor_loads_what_was_deleted_after_its_load(redis: Redis, pool: AdapterPool, tmp_path: Path) -> None:
    """The learner dies after it has loaded a checkpoint, whose deletion follows: the files stay until a state contains
    the load.
    """
    folder = tmp_path / "server" / "checkpoints" / "a" / "weights" / "x@3"
    data = [encode_request(make_data(("weights",), seed=seed)) for seed in range(2)]
    step = OptimStep(learning_rate=1e-2)
    load = LoadWeights("tinker://a/weights/x", str(folder), with_optimizer=True)
    send(redis, "a", [CreateModel(), data[0], step, SaveWeights("x"), data[1], step, load, data[1], step, step])
    with pytest.raises(KilledError):
        run(log := StoppingLog(redis, 9), pool, tmp_path / "server")
    stored = [redis.get(log.keys.result(request_id_of("a", seq_id))) for seq_id in range(9)]
    redis.hdel(log.keys.checkpoints, "tinker://a/weights/x")
    redis.sadd(log.keys.discarded_folders, str(folder))
    run(log := StoppingLog(redis), pool, tmp_path / "server")
    assert [result.encode() for _, _, result in log.repeated] == stored
    assert log.unused_folders() == [str(folder)]
    run(log := StoppingLog(redis), pool, tmp_path / "server")
    assert (log.unused_folders(), folder.exists()) == ([], False)


def test_a_repetition_that_leaves_another_state_is_found(redis: Redis, pool: AdapterPool, tmp_path: Path) -> None:
    """Files that a command has loaded are lost before a successor repeats it."""
    folder = tmp_path / "server" / "checkpoints" / "a" / "weights" / "x@1"
    load = LoadWeights("tinker://a/weights/x", str(folder), with_optimizer=True)
    data, step = encode_request(make_data(("weights",))), OptimStep(learning_rate=1e-2)
    send(redis, "a", [CreateModel(), SaveWeights("x")])
    run(StoppingLog(redis), pool, tmp_path / "server")
    send(redis, "b", [CreateModel(), load, data, step, step])
    with pytest.raises(KilledError):
        run(StoppingLog(redis, 4), pool, tmp_path / "server")
    shutil.rmtree(folder)
    run(log := StoppingLog(redis), pool, tmp_path / "server")
    evidence = read_evidence(log, redis, "b")
    assert list(evidence.diverged) == [1], "those after it follow from it"
    assert find_problems(evidence)[0] == (
        "command 1 (load_weights) was repeated after a kill and left version 0 and a gradient of 0 sequences, not what was "
        "acknowledged"
    )
    assert find_problems(read_evidence(log, redis, "a")) == []


def test_a_replaced_checkpoints_files_are_removed(redis: Redis, pool: AdapterPool, tmp_path: Path) -> None:
    """Once the load that was accepted before is in a state on disk."""
    folder = tmp_path / "server" / "checkpoints" / "a" / "weights"
    load = LoadWeights("tinker://a/weights/x", str(folder / "x@1"), with_optimizer=True)
    send(redis, "a", [CreateModel(), SaveWeights("x"), SaveWeights("x", should_overwrite=True), load])
    run(log := StoppingLog(redis), pool, tmp_path / "server")
    loaded: Any = redis.get(log.keys.result(request_id_of("a", 3)))
    assert b"error" not in Result.decode(loaded).body
    assert {path.name for path in folder.iterdir()} == {"x@1", "x@2"}
    run(log, pool, tmp_path / "server")
    assert {path.name for path in folder.iterdir()} == {"x@2"}
    assert not redis.exists(log.keys.discarded_folders)


def test_models_share_passes_within_the_limit(redis: Redis, pool: AdapterPool, tmp_path: Path) -> None:
    """`a` has 15 tokens, `b` 31 and `c` 35: of 50, `a` and `b` fit, then `c` and the next ones of `a`."""
    submit(redis)
    with pytest.raises(KilledError):
        run(log := StoppingLog(redis, 6), pool, tmp_path / "server", shared_pass_tokens=50)
    assert log.shared_pass("a", 1) == SharedPass(after=[31])
    assert log.shared_pass("b", 1) == SharedPass(before=[5, 3, 7])
    assert log.shared_pass("c", 1) == SharedPass(after=[5, 3, 7])
    reported = redis.get(log.keys.activity)
    assert isinstance(reported, bytes)
    assert msgspec.json.decode(reported, type=LearnerActivity).commands == {"c": 1, "a": 2}


def test_a_command_that_can_not_be_read_fails_alone(
    redis: Redis, pool: AdapterPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the learner, which reads it for a pass that models share."""

    def fail_for_b(datum: Datum, *args: Any, **kwargs: Any) -> None:
        if len(datum.tokens) == 31:
            raise ValueError("maximum supported dimension")
        check_datum(datum, *args, **kwargs)

    monkeypatch.setattr("offbeat.trainer.tinker.executor.check_datum", fail_for_b)
    submit(redis)
    run(log := StoppingLog(redis), pool, tmp_path / "server")
    answers = results(log, redis)
    assert all((b"maximum supported" in (answers[f"{each}:1"] or b"")) == (each == "b") for each in MODELS)
    assert [log.applied(each) for each in MODELS] == [NUM_COMMANDS // len(MODELS) - 1] * len(MODELS)


def test_without_a_limit_each_model_has_its_passes(redis: Redis, pool: AdapterPool, tmp_path: Path) -> None:
    """Its results are to the bit those of a server without other models."""
    submit(redis)
    run(log := StoppingLog(redis), pool, tmp_path / "server", shared_pass_tokens=0)
    together = results(log, redis)
    redis.flushdb()
    submit(redis)
    redis.hdel(log.keys.models, "b", "c")
    run(log := StoppingLog(redis), pool, tmp_path / "other", shared_pass_tokens=0)
    alone = results(log, redis)
    assert all(alone[each] == together[each] for each in alone if each.startswith("a"))


def test_a_command_whose_wakeup_was_lost_is_applied(
    redis: Redis, pool: AdapterPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis removes a wakeup as it sends it: a connection that breaks then has lost it."""
    monkeypatch.setattr("offbeat.trainer.tinker.learner.TIDY_INTERVAL_S", 0.0)
    monkeypatch.setattr("offbeat.trainer.tinker.learner.SAVE_INTERVAL_S", 0.0)

    class Log(StoppingLog):
        def wait(self, timeout_s: float) -> set[str]:
            if redis.hlen(self.keys.applied):
                return super().wait(timeout_s)
            send(redis, "a", [CreateModel()])
            return set()

    run(log := Log(redis), pool, tmp_path / "server")
    assert log.applied("a") == 0
