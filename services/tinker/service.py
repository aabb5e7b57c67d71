"""Tinker's API over the command logs and the sampler.

Invariants: a repeated call changes nothing and gets the same answer; other keys' records are not found.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from offbeat.services.errors import CodecError, MeshError
from offbeat.services.tinker.checkpoints import CheckpointExpiry, Checkpoints
from offbeat.services.tinker.config import TinkerConfig
from offbeat.services.tinker.errors import GoneError, NotFoundError, TinkerError
from offbeat.services.tinker.expiry import ResultExpiry, SessionExpiry
from offbeat.services.tinker.futures import MAX_TOP_VALUES, SampleFutures, SampleSize
from offbeat.services.tinker.owned_records import OwnedRecords
from offbeat.services.tinker.records import (
    AdapterVersion,
    CheckpointKind,
    CheckpointRecord,
    Command,
    CreateModel,
    ForwardBackwardCommand,
    LoadWeights,
    Lora,
    Metadata,
    ModelRecord,
    PublishSampler,
    RefusedCommand,
    Result,
    SamplerRecord,
    SaveWeights,
    request_id_of,
)
from offbeat.services.tinker.refusals import check_metadata, read_adam, refuse_metadata, refuse_name, refuse_ttl
from offbeat.services.tinker.sampling import Sampler, count_top, prompt_tokens
from offbeat.services.tinker.schemas import (
    CreateModelBody,
    CreateSamplerBody,
    ExternalWeightsBody,
    LoadWeightsBody,
    LoraBody,
    OptimizerBody,
    OptimStepBody,
    SampleBody,
    SamplerWeightsBody,
    SaveWeightsBody,
)
from offbeat.services.tinker.store import TinkerStore
from offbeat.services.tinker.wire import decode_forward_backward, encode_sample_response

logger = logging.getLogger(__name__)

NO_EXTERNAL_WEIGHTS = (
    "save_weights_external is not available: save_weights_for_sampler writes a PEFT adapter, into checkpoints/ of the "
    "server's folder"
)
NO_TOKENS = "weights_access_token is not available: a key has its own checkpoints alone"
MAX_PATH_CHARS = 256
MAX_COMMAND_BYTES = 64 << 20
SEED_BITS = 31
WAIT_S = 20.0
"""Long poll; below the SDK's timeout of 45 s."""


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """folder: has the tokenizer; context: longest sequence, tokens."""

    name: str
    folder: str
    architecture: str
    context: int


class TinkerService:
    def __init__(self, store: TinkerStore, sampler: Sampler, base: BaseModelInfo, config: TinkerConfig) -> None:
        self.store = store
        self.records = OwnedRecords(store)
        self.checkpoints = Checkpoints(store, self.records, config.max_saved_gib)
        self.base = base
        self._sampler = sampler
        self._config = config
        self._futures = SampleFutures(config.max_samples)
        self._background: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def background(self) -> AsyncIterator[None]:
        """Listen for results, end idle sessions, and delete expired checkpoints and results that were fetched, for as long
        as the context is open.
        """
        sessions = SessionExpiry(self.records, self._config.session_timeout_s)
        results, checkpoints = ResultExpiry(self.store), CheckpointExpiry(self.checkpoints)
        work = (self.store.listen(), sessions.run(), results.run(), checkpoints.run())
        self._background = [asyncio.create_task(each) for each in work]
        try:
            yield
        finally:
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)  # `check` has raised what failed before
            self._futures.close()

    async def create_model(self, owner: str, body: CreateModelBody) -> tuple[str, str]:
        """Return the request's and the model's id; raises TinkerError."""
        await self.records.check_session(owner, body.session_id)
        self._check_base(body.base_model)
        _check_optimizer(body.optimizer_config)
        if body.lora_config is None:
            raise TinkerError("lora_config is missing: all weights of a model can't be trained here")
        lora = self._read_lora(body.lora_config)
        return await self._create(owner, body.session_id, body.model_seq_id, lora, body.user_metadata, CreateModel())

    async def forward_backward(self, owner: str, body: bytes) -> tuple[str, str]:
        """Return the request's and the model's id; raises TinkerError."""
        try:
            request = decode_forward_backward(body)
        except CodecError as error:
            raise TinkerError(str(error)) from error
        if request.seq_id < 1:
            raise TinkerError(f"seq_id {request.seq_id}: commands of a model count from 1")
        command: Command = ForwardBackwardCommand(body)
        if len(body) > MAX_COMMAND_BYTES:
            command = RefusedCommand(
                f"the body has more than {MAX_COMMAND_BYTES >> 20} MiB: send fewer sequences at once"
            )
        return await self._submit(owner, request.model_id, request.seq_id, command)

    async def optim_step(self, owner: str, body: OptimStepBody) -> tuple[str, str]:
        command: Command
        if body.adam_params is None:
            command = RefusedCommand("optimizer_params are not available: pass AdamParams")
        else:
            command = read_adam(body.adam_params)
        return await self._submit(owner, body.model_id, body.seq_id, command)

    async def save_weights(self, owner: str, body: SaveWeightsBody) -> tuple[str, str]:
        command = await self._save(owner, body, "training")
        return await self._submit(owner, body.model_id, body.seq_id, command)

    async def save_weights_for_sampler(self, owner: str, body: SamplerWeightsBody) -> tuple[str, str]:
        if body.path is not None or body.sampling_session_seq_id is None:
            command = await self._save(owner, body, "sampler")
        else:
            record = await self.records.model(owner, body.model_id)
            sampler_id = _sampler_id(record.session_id, body.sampling_session_seq_id)
            command = PublishSampler(sampler_id, body.kind == "inflight")
        return await self._submit(owner, body.model_id, body.seq_id, command)

    async def load_weights(self, owner: str, body: LoadWeightsBody) -> tuple[str, str]:
        """Load into a model, or create one from a checkpoint; raises TinkerError."""
        if body.base_model is not None:
            self._check_base(body.base_model)
        _check_optimizer(body.optimizer_config)
        start = await self._find_start(owner, body)
        if body.model_id is not None and body.seq_id is not None:
            return await self._submit(owner, body.model_id, body.seq_id, start)
        if body.session_id is None or body.model_seq_id is None:
            raise TinkerError("load_weights needs model_id and seq_id, or session_id and model_seq_id")
        if isinstance(start, RefusedCommand):
            raise NotFoundError(start.error)
        await self.records.check_session(owner, body.session_id)
        checkpoint = await self.records.checkpoint(owner, body.path)
        self._check_rank(checkpoint.lora.rank)
        return await self._create(
            owner, body.session_id, body.model_seq_id, checkpoint.lora, body.user_metadata, CreateModel(start)
        )

    async def save_weights_external(self, owner: str, body: ExternalWeightsBody) -> tuple[str, str]:
        """Refuse the command in its place."""
        return await self._submit(owner, body.model_id, body.seq_id, RefusedCommand(NO_EXTERNAL_WEIGHTS))

    async def create_sampler(self, owner: str, body: CreateSamplerBody) -> str:
        """Open a sampling session of a checkpoint or the base model; raises TinkerError."""
        await self.records.check_session(owner, body.session_id)
        checkpoint: CheckpointRecord | None = None
        if body.model_path is not None:
            checkpoint = await self.records.checkpoint(owner, body.model_path)
        elif body.base_model is not None:
            self._check_base(body.base_model)
        else:
            raise TinkerError("create_sampling_session needs base_model or model_path")
        sampler_id = _sampler_id(body.session_id, body.sampling_session_seq_id)
        record = SamplerRecord(
            owner=owner,
            model_id=checkpoint and checkpoint.model_id,
            model_path=body.model_path,
            adapter=checkpoint and checkpoint.adapter,
        )
        await self.store.put_once(self.store.keys.samplers, sampler_id, record)
        return sampler_id

    async def sample(self, owner: str, body: SampleBody) -> tuple[str, list[str]]:
        """Start sampling; return the request's id and the sequences'. Raises TinkerError."""
        record = await self.records.sampler(owner, body.sampling_session_id)
        request_id = f"{body.sampling_session_id}:{body.seq_id}"
        size = SampleSize(body.num_samples, count_top(body, self.base.context))
        if size.top_values > MAX_TOP_VALUES:
            raise TinkerError(
                f"up to {size.top_values} likely tokens would be returned, and {MAX_TOP_VALUES} may be: lower "
                "topk_sample_logprobs, topk_prompt_logprobs, num_samples or max_tokens"
            )
        self._futures.start(request_id, owner, size, self._sample(body, request_id, record))
        return request_id, [f"{request_id}:{i}" for i in range(body.num_samples)]

    async def retrieve(self, owner: str, request_id: str) -> Result | None:
        """Return a result; None if it is not ready. Raises GoneError, NotFoundError."""
        task = self._futures.find(request_id, owner)
        if task is not None:
            return await _wait(task, WAIT_S)
        parent, _, number = request_id.rpartition(":")
        if await self.store.find(self.store.keys.samplers, parent, SamplerRecord) is not None:
            await self.records.sampler(owner, parent)
            raise GoneError(f"sample {request_id} is gone: send it again")
        await self.records.model(owner, parent)
        if not (number.isascii() and number.isdecimal()):
            raise NotFoundError(f"there is no request {request_id}")
        # Read before `is_applied`: what is applied meanwhile leaves the log, and its model may be closed
        is_closed, is_logged = await self.store.is_closed(parent), await self.store.is_logged(parent, int(number))
        if not await self.store.is_applied(parent, int(number)):
            if is_closed:
                raise GoneError(f"{request_id} was not applied before the session of model {parent} ended")
            if not is_logged:
                raise GoneError(
                    f"command {request_id} is not known: it was never sent, or Redis has lost it. Load a checkpoint in a "
                    "new session"
                )
            return await self.store.wait_for_result(request_id, WAIT_S)
        if (result := await self.store.result(request_id)) is None:
            raise GoneError(f"the result of {request_id} is not kept any more")
        return result

    async def cancel(self, owner: str, request_id: str) -> None:
        self._futures.cancel(request_id, owner)

    async def check(self) -> None:
        """Raise RetryableError if the engine is dead, or what a background task has failed with."""
        for task in self._background:
            if task.done() and not task.cancelled():  # cancelled: the context is being closed
                task.result()
        await self._sampler.check()

    async def _create(
        self,
        owner: str,
        session_id: str,
        number: int,
        lora: Lora,
        metadata: Metadata | None,
        command: CreateModel,
    ) -> tuple[str, str]:
        check_metadata(metadata)
        model_id = f"{session_id}:train:{number}"
        await self._check_models(owner, model_id)
        record = ModelRecord(
            owner=owner, session_id=session_id, created_at=time.time(), lora=lora, user_metadata=metadata
        )
        await self.store.add_model(model_id, record)
        await self.store.submit(model_id, owner, 0, command)
        if (session := await self.records.session(owner, session_id)).is_finished:  # meanwhile: close this model, too
            await self.store.end_session(session_id, session)
        return request_id_of(model_id, 0), model_id

    async def _check_models(self, owner: str, model_id: str) -> None:
        """Raise TinkerError if the owner may have no further model."""
        others = await self.store.open_models(owner) - {model_id}
        if len(others) >= self._config.max_models_per_key:
            raise TinkerError(
                f"this key has {len(others)} models (tinker.max_models_per_key): end a session by ServiceClient.close"
            )

    async def _save(self, owner: str, body: SaveWeightsBody, kind: CheckpointKind) -> SaveWeights | RefusedCommand:
        """Refuse a bad name or expiry, and a checkpoint beyond the owner's disk space."""
        if complaint := await self.checkpoints.complain_of_size(owner):
            return RefusedCommand(complaint)
        name = body.path or f"seq-{body.seq_id}"
        command = SaveWeights(name, kind, body.overwrite, body.user_metadata, body.ttl_seconds)
        return refuse_name(name) or refuse_ttl(body.ttl_seconds) or refuse_metadata(body.user_metadata) or command

    async def _submit(self, owner: str, model_id: str, seq_id: int, command: Command) -> tuple[str, str]:
        await self.records.model(owner, model_id)
        if seq_id < 1:
            raise TinkerError(f"seq_id {seq_id}: commands of a model count from 1")
        await self.store.submit(model_id, owner, seq_id, command)
        return request_id_of(model_id, seq_id), model_id

    async def _find_start(self, owner: str, body: LoadWeightsBody) -> LoadWeights | RefusedCommand:
        path = body.path
        if not 0 < len(path) <= MAX_PATH_CHARS:
            return RefusedCommand(f"no checkpoint has a path of {len(path)} characters")
        try:
            checkpoint = await self.records.checkpoint(owner, path)
        except NotFoundError as error:
            return RefusedCommand(NO_TOKENS if body.weights_access_token else str(error))
        if checkpoint.kind != "training":
            return RefusedCommand(f"{path} is for sampling: load a checkpoint of save_state")
        return LoadWeights(path, checkpoint.adapter.folder, body.optimizer)

    async def _sample(self, body: SampleBody, request_id: str, record: SamplerRecord) -> Result:
        try:
            self._check_sample(body)
            name, adapter = await self._find_adapter(record)
            answer = await self._sampler.sample(body, request_id, name, adapter)
        except TinkerError as error:
            return Result.of_error(str(error))
        if record.model_id is not None:
            sequences = Counter(each.versions[0] for each in answer.sequences if each.versions)
            tokens = Counter(version for each in answer.sequences for version in each.versions)
            await self.store.count_samples(record.model_id, sequences, tokens)
        return Result(encode_sample_response(answer), is_protobuf=True)

    async def _find_adapter(self, record: SamplerRecord) -> tuple[str, AdapterVersion | None]:
        """Return the name in the engine and the weights, empty and None for the base model; raises TinkerError."""
        if record.inflight_model_id is not None:
            model_id = record.inflight_model_id
            newest = await self.store.find(self.store.keys.inflight, model_id, AdapterVersion)
            if newest is None:  # the base model would be sampled
                raise TinkerError(f"the weights of model {model_id} were deleted: its session has ended")
            return f"inflight {model_id}", newest
        return (record.adapter.folder if record.adapter is not None else ""), record.adapter

    def _check_sample(self, body: SampleBody) -> None:
        """Refuse unsupported requests by TinkerError."""
        unsupported = {
            "target_prompt_logprobs": body.target_prompt_logprobs,
            "prompt_alt_tokens_k": body.prompt_alt_tokens_k,
        }
        if wanted := [name for name, value in unsupported.items() if value]:
            raise TinkerError(f"{wanted[0]} is not available: take prompt_logprobs, or TrainingClient.forward")
        if not (tokens := prompt_tokens(body)) or len(tokens) >= self.base.context:
            raise TinkerError(f"a prompt of {len(tokens)} tokens: 1 to {self.base.context - 1} fit the model")

    def _check_base(self, name: str) -> None:
        if name not in (self.base.name, self.base.folder):
            raise TinkerError(f"base_model {name!r} is not served: there is {self.base.name!r}")

    def _check_rank(self, rank: int) -> None:
        if rank > self._config.max_lora_rank:
            raise TinkerError(f"rank {rank} exceeds {self._config.max_lora_rank} (tinker.max_lora_rank)")

    def _read_lora(self, body: LoraBody) -> Lora:
        self._check_rank(body.rank)
        if not (body.train_attn or body.train_mlp or body.train_unembed):
            raise TinkerError("nothing is to be trained: set train_attn, train_mlp or train_unembed")
        seed = secrets.randbits(SEED_BITS) if body.seed is None else body.seed
        return Lora(
            rank=body.rank,
            seed=seed,
            train_attn=body.train_attn,
            train_mlp=body.train_mlp,
            train_unembed=body.train_unembed,
        )


def _check_optimizer(given: OptimizerBody | None) -> None:
    if given is not None and given.type != "adamw":
        raise TinkerError(f"optimizer {given.type!r} is not available: take adamw")


async def _wait(task: asyncio.Task[Result], timeout_s: float) -> Result | None:
    """Return a sample's result, if in time; raises GoneError if it must be sampled again."""
    await asyncio.wait({task}, timeout=timeout_s)
    if not task.done():
        return None
    if task.cancelled():
        raise GoneError("the sample was cancelled")
    if (error := task.exception()) is not None:
        if not isinstance(error, MeshError):
            logger.error("a sample failed", exc_info=error)
        raise GoneError(f"send the sample again: {error}") from error
    return task.result()


def _sampler_id(session_id: str, number: int) -> str:
    return f"{session_id}:sample:{number}"
