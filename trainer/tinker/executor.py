"""Sequential execution of the models' commands.

Invariants: equal commands on equal states give equal weights and results; a refused command changes nothing, but that
an optimizer step clears a gradient that is not finite.
"""

import logging
import shutil
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError

from offbeat.services.errors import CodecError, MeshError
from offbeat.services.tinker.log import CommandLog, Write
from offbeat.services.tinker.records import (
    AdapterVersion,
    AppliedCommand,
    CheckpointRecord,
    Command,
    CreateModel,
    ForwardBackwardCommand,
    LoadWeights,
    ModelRecord,
    OptimStep,
    PublishSampler,
    RefusedCommand,
    Result,
    SamplerRecord,
    SaveWeights,
    SharedPass,
    StepMetrics,
    decode_command,
    kind_of,
    tinker_path,
)
from offbeat.services.tinker.wire import ForwardBackward, decode_forward_backward, encode_forward_backward_output
from offbeat.trainer.tinker.adapters import AdapterPool
from offbeat.trainer.tinker.client_model import ClientModel, Scores
from offbeat.trainer.tinker.folders import STATE, TinkerFolder, publish, size_of
from offbeat.trainer.tinker.losses import check_datum, find_loss, read_settings
from offbeat.trainer.tinker.shared_pass import GradientBatch, compute_shared, record_shared, repeat_shared

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """context: tokens of a sequence; max_tokens: per pass; max_models: in memory."""

    context: int
    max_tokens: int
    max_models: int


class StateNotSavedError(MeshError):
    """State that can't be written now, on a full disk say; nothing has changed."""


@dataclass(frozen=True, slots=True)
class QueuedCommand:
    """Next command of a model. If it is repeated, shared: what it was computed with; first: what it left."""

    model_id: str
    record: ModelRecord
    seq_id: int
    data: bytes
    shared: SharedPass | None = None
    first: AppliedCommand | None = None


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """num_added: sequences added to the gradient; discarded: folder of a replaced checkpoint; applied: the entry."""

    result: Result
    writes: tuple[Write, ...] = ()
    discarded: str = ""
    num_added: int = 0
    is_refused: bool = False
    applied: AppliedCommand | None = None


class Executor:
    def __init__(self, pool: AdapterPool, log: CommandLog, folder: TinkerFolder, limits: ExecutorLimits) -> None:
        self._pool = pool
        self._log = log
        self._folder = folder
        self._limits = limits
        self._models: OrderedDict[str, ClientModel] = OrderedDict()
        """Least recently used first."""
        self._contained: dict[str, int] = {}
        """Last applied command by opened model."""
        self._saved: dict[str, int] = {}
        """Last command in a model's state on disk."""

    def contained(self, model_id: str) -> int:
        """Return the last command that a model contains, loaded from disk if there. -1: none"""
        if model_id not in self._contained and self._folder.state(model_id).exists():
            self._contained[model_id] = self._reopen(model_id).seq_id
        return self._contained.get(model_id, -1)

    @property
    def opened(self) -> dict[str, int]:
        """Last command by model that was opened."""
        return dict(self._contained)

    def go_back(self, model_id: str) -> int:
        """Return a model to its state on disk; return the last command that it contains, or -1."""
        if model_id in self._models:
            self._models.pop(model_id).close()
        self._contained.pop(model_id, None)
        return self._saved.get(model_id, -1)

    def has_loaded(self, model_id: str) -> bool:
        return model_id in self._models

    def apply(self, queued: QueuedCommand) -> CommandOutcome:
        """Apply a command to a model that contains its predecessor; one that was refused before is refused again.

        Raises:
            StateNotSavedError: it needs the place of a model whose state can't be written.
        """
        first = queued.first
        kind = first.kind if first is not None else ""
        try:
            if first is not None and first.is_refused:
                raise CodecError(self._repeat_refusal(queued.model_id, first))
            command = decode_command(queued.data)
            kind = kind_of(type(command))
            outcome = self._apply(queued, command)
        except StateNotSavedError:
            raise
        except CodecError as error:
            outcome = CommandOutcome(Result.of_error(str(error)), is_refused=True)
        except Exception as error:  # reported to the client, whose later commands are executed
            logger.exception("command %d (%s) of model %s failed", queued.seq_id, kind, queued.model_id)
            if first is not None and self._may_pass(error, queued.model_id):
                self._log.count_death(queued.model_id, queued.seq_id)
                raise  # the client was told that it is applied: a successor tries again
            result = Result.of_error(f"{type(error).__name__}: {error}", "server")
            outcome = CommandOutcome(result, is_refused=True)
        self._contain(queued)
        return self._record(queued, kind, outcome)

    def _may_pass(self, error: Exception, model_id: str) -> bool:
        """Return whether a repetition that failed may succeed in a successor, and its model is as it was before."""
        return not isinstance(error, FileNotFoundError) and not self._log.has_diverged(model_id)

    def read_gradient(self, queued: QueuedCommand) -> GradientBatch | None:
        """Return what a command adds to a gradient of a model in memory; None if it is another one, or is refused."""
        if (model := self._models.get(queued.model_id)) is None:
            return None
        try:
            command = decode_command(queued.data)
            if not isinstance(command, ForwardBackwardCommand):
                return None
            request, batch = self._read_batch(model, command)
        except Exception:  # `apply` informs the client, and those that share its pass go on
            return None
        return None if request.forward_only else batch

    def apply_shared(self, commands: Sequence[QueuedCommand], batches: Sequence[GradientBatch]) -> list[CommandOutcome]:
        """Apply gradients of different models in one pass, or each alone if it fails. batches: by `read_gradient`."""
        try:
            scores = compute_shared(self._pool, batches)
        except Exception:
            logger.exception("a pass of %d models failed: each has its own", len(commands))
            return [self.apply(queued) for queued in commands]
        outcomes: list[CommandOutcome] = []
        for queued, batch, own, shared in zip(commands, batches, scores, record_shared(batches), strict=True):
            self._models.move_to_end(queued.model_id)
            self._contain(queued)
            write = Write.of(self._log.keys.shared_passes(queued.model_id), str(queued.seq_id), shared)
            outcome = CommandOutcome(_answer(own, batch), (write,), num_added=len(batch.data))
            outcomes.append(self._record(queued, kind_of(ForwardBackwardCommand), outcome))
        return outcomes

    def save(self, model_id: str) -> int:
        """Write a model's state, unless it is on disk alone; return the last command that it contains, or -1.

        Commands that were refused without the model may be later. Raises StateNotSavedError.
        """
        if model_id in self._models:
            self._save_state(model_id)
        return self._saved.get(model_id, -1)

    def _save_state(self, model_id: str) -> None:
        model = self._models[model_id]
        try:
            model.save(self._folder.state(model_id))
        except (OSError, SafetensorError) as error:
            raise StateNotSavedError(f"the state of model {model_id} can't be written: {error}") from error
        self._saved[model_id] = model.seq_id

    def discard(self, model_ids: Collection[str]) -> None:
        """Forget models that take no more commands; their checkpoints stay."""
        for model_id in model_ids:
            self.go_back(model_id)
            self._saved.pop(model_id, None)
            self._folder.discard(model_id)

    def _contain(self, queued: QueuedCommand) -> None:
        self._contained[queued.model_id] = queued.seq_id
        if queued.model_id in self._models:
            self._models[queued.model_id].seq_id = queued.seq_id

    def _record(self, queued: QueuedCommand, kind: str, outcome: CommandOutcome) -> CommandOutcome:
        """Add the entry of an applied command."""
        model = self._models.get(queued.model_id)
        applied = AppliedCommand(
            kind=kind,
            at=time.time(),
            version=model and model.version,
            num_sequences=model.accumulated.num_sequences if model else 0,
            num_added=outcome.num_added,
            is_refused=outcome.is_refused,
        )
        write = Write.of(self._log.keys.applied_commands(queued.model_id), str(queued.seq_id), applied)
        return replace(outcome, writes=(*outcome.writes, write), applied=applied)

    def _apply(self, queued: QueuedCommand, command: Command) -> CommandOutcome:
        model_id, record, seq_id = queued.model_id, queued.record, queued.seq_id
        match command:
            case CreateModel():
                return self._create(model_id, record, command)
            case ForwardBackwardCommand():
                return self._forward_backward(queued, self._model(model_id), command)
            case OptimStep():
                return self._step(model_id, seq_id, command)
            case SaveWeights():
                return self._save_weights(queued, command)
            case LoadWeights():
                return self._load_weights(model_id, command)
            case PublishSampler():
                return self._publish(queued, command)
            case RefusedCommand():
                raise CodecError(command.error)

    def _repeat_refusal(self, model_id: str, first: AppliedCommand) -> str:
        """Repeat what a refused command has changed; return why it is refused."""
        if first.kind == kind_of(OptimStep) and first.version is not None and not first.num_sequences:
            self._model(model_id).clear_gradients()  # they were not finite
        return "it was refused before"

    def _open(self, model_id: str, record: ModelRecord) -> ClientModel:
        while len(self._models) >= self._limits.max_models:
            oldest = next(iter(self._models))
            self._save_state(oldest)
            self._models.pop(oldest).close()
        self._models[model_id] = ClientModel(self._pool, record.lora)
        return self._models[model_id]

    def _model(self, model_id: str) -> ClientModel:
        if model_id not in self._models:
            if not self._folder.state(model_id).exists():
                raise CodecError(f"model {model_id} could not be created: create another one")
            self._reopen(model_id)
        self._models.move_to_end(model_id)
        return self._models[model_id]

    def _reopen(self, model_id: str) -> ClientModel:
        model = self._open(model_id, self._log.model(model_id))
        try:
            model.load(self._folder.state(model_id))
        except BaseException:
            self._models.pop(model_id).close()
            raise
        self._saved[model_id] = model.seq_id
        return model

    def _create(self, model_id: str, record: ModelRecord, command: CreateModel) -> CommandOutcome:
        self._open(model_id, record)
        if command.start is None:
            return CommandOutcome(Result.of_json({"type": "create_model", "model_id": model_id}))
        try:
            return self._load_weights(model_id, command.start)
        except BaseException:
            self._models.pop(model_id).close()
            raise

    def _forward_backward(
        self, queued: QueuedCommand, model: ClientModel, command: ForwardBackwardCommand
    ) -> CommandOutcome:
        request, batch = self._read_batch(model, command, is_repeated=queued.first is not None)
        num_added = 0 if request.forward_only else len(batch.data)
        if queued.shared is not None:
            return CommandOutcome(_answer(repeat_shared(self._pool, batch, queued.shared), batch), num_added=num_added)
        scores = model.compute(
            batch.data,
            batch.loss,
            batch.settings,
            backward=not request.forward_only,
            max_tokens=self._limits.max_tokens,
        )
        return CommandOutcome(_answer(scores, batch), num_added=num_added)

    def _read_batch(
        self, model: ClientModel, command: ForwardBackwardCommand, *, is_repeated: bool = False
    ) -> tuple[ForwardBackward, GradientBatch]:
        request = decode_forward_backward(command.body)
        loss = find_loss(request.loss_fn)
        settings = read_settings(request.loss_fn, loss, request.loss_config)
        data = request.data(is_repeated=is_repeated)
        if not data:
            raise CodecError("data is empty: send at least one datum")
        for i, datum in enumerate(data):
            check_datum(datum, loss, vocab_size=self._pool.vocab_size, context=self._limits.context, path=f"data[{i}]")
        return request, GradientBatch(model, data, loss, settings)

    def _step(self, model_id: str, seq_id: int, command: OptimStep) -> CommandOutcome:
        model = self._model(model_id)
        accumulated = model.accumulated
        metrics = model.step(command)
        record = StepMetrics(
            at=time.time(),
            version=model.version,
            loss=accumulated.loss,
            num_sequences=accumulated.num_sequences,
            num_tokens=accumulated.num_tokens,
            grad_norm=metrics["grad_norm"],
            learning_rate=command.learning_rate,
        )
        keys = self._log.keys
        writes = (
            Write.of(keys.metrics(model_id), str(seq_id), record),
            Write.of(keys.newest_steps, model_id, record),
        )
        return CommandOutcome(Result.of_json({"metrics": metrics}), writes)

    def _save_weights(self, queued: QueuedCommand, command: SaveWeights) -> CommandOutcome:
        model_id, record, seq_id = queued.model_id, queued.record, queued.seq_id
        path = tinker_path(model_id, command.kind, command.name)
        folder = self._folder.checkpoint(model_id, command.kind, command.name, seq_id)
        existing = self._log.checkpoint(path)
        now = time.time()
        if existing is not None and existing.adapter.folder != str(folder) and not command.should_overwrite:
            raise CodecError(f"{path} exists, and is immutable: choose another name")
        adapter = self._write_adapter(queued, folder, with_state=command.kind == "training")
        saved = CheckpointRecord(
            model_id=model_id,
            kind=command.kind,
            created_at=now,
            adapter=adapter,
            lora=record.lora,
            size_bytes=size_of(folder),
            user_metadata=command.user_metadata,
            expires_at=None if command.ttl_seconds is None else now + command.ttl_seconds,
        )
        writes = self._log.checkpoint_writes(record.owner, path, saved)
        replaced = existing.adapter.folder if existing is not None and existing.adapter.folder != str(folder) else ""
        return CommandOutcome(Result.of_json({"path": path}), writes, replaced)

    def _load_weights(self, model_id: str, command: LoadWeights) -> CommandOutcome:
        self._model(model_id).adopt(Path(command.folder) / STATE, with_optimizer=command.with_optimizer)
        return CommandOutcome(Result.of_json({"path": command.path, "model_id": model_id, "type": "load_weights"}))

    def _publish(self, queued: QueuedCommand, command: PublishSampler) -> CommandOutcome:
        model_id, record = queued.model_id, queued.record
        adapter = self._write_adapter(queued, self._folder.sampler(model_id, queued.seq_id), with_state=False)
        keys, session_id = self._log.keys, command.sampling_session_id
        if command.is_inflight:
            sampler = SamplerRecord(owner=record.owner, model_id=model_id, inflight_model_id=model_id)
            writes = (Write.of(keys.inflight, model_id, adapter), Write.of(keys.samplers, session_id, sampler))
        else:
            sampler = SamplerRecord(owner=record.owner, model_id=model_id, adapter=adapter)
            writes = (Write.of(keys.samplers, session_id, sampler),)
        return CommandOutcome(Result.of_json({"sampling_session_id": session_id}), writes)

    def _write_adapter(self, queued: QueuedCommand, folder: Path, *, with_state: bool) -> AdapterVersion:
        """Write a folder, unless it is there from a command that is repeated, as it may have readers."""
        model = self._model(queued.model_id)
        adapter = AdapterVersion(folder=str(folder), version=model.version)
        if queued.first is not None and folder.exists():
            return adapter
        written = folder.with_name(f".{folder.name}")
        shutil.rmtree(written, ignore_errors=True)
        written.parent.mkdir(parents=True, exist_ok=True)
        model.save_adapter(written)
        if with_state:
            model.save(written / STATE)
        publish(written, folder)
        return adapter


def _answer(scores: Scores, batch: GradientBatch) -> Result:
    metrics = {"loss:sum": scores.loss, "tokens:sum": float(batch.num_tokens)}
    return Result(encode_forward_backward_output({"logprobs": scores.logprobs}, metrics), is_protobuf=True)
