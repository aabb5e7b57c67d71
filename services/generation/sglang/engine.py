"""SGLang's engine over its HTTP API, with weight changes while it runs.

Invariants: a version is loaded while the scheduler is paused, so that each token has one version; a prompt reuses no keys
and values of older weights.
"""

# pyright: basic
import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from offbeat.services.chat.stops import cut_completion, load_decoder, stop_strings_of
from offbeat.services.errors import GenerationError, RetryableError, RolloutError
from offbeat.services.generation.config import GenerationConfig, sampling_mask_limit
from offbeat.services.generation.engine import KvLoad, LoadTimes, SessionCounts
from offbeat.services.generation.sglang.server import (
    PROGRAM,
    SglangServer,
    has_tokenizer,
    server_arguments,
    server_environment,
)
from offbeat.services.messages.types import Completion, FinishReason, GenerateRequest, Sampling, VersionSpan

ID_END = "$"
"""Ends requests' ids, as the server aborts all whose ids begin with the given one."""
FINISH_REASONS = {"stop": FinishReason.STOP, "abort": FinishReason.ABORT}
"""Of SGLang; others leave an answer incomplete."""
PAUSES = {"keep": "in_place", "recompute": "retract"}
"""`on_weight_update` -> mode of `/pause_generation`."""
CUT_LOGPROBS = "output_token_sampling_logprobs"
CHECK_TIMEOUT_S = 10.0
WEIGHTS = "model.safetensors"


class SglangEngine:
    def __init__(
        self, server: SglangServer, http: httpx.AsyncClient, model: Path, config: GenerationConfig, salt: str = ""
    ) -> None:
        self._server = server
        self._http = http
        self._model = model
        self._config = config
        self._salt = salt
        self._salted = config.engine.enable_prefix_caching
        self._mask_limit = sampling_mask_limit(config.engine)
        self._aborting: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(
        cls,
        config: GenerationConfig,
        model: Path,
        *,
        sequence_length: int,
        seed: int,
        program: Sequence[str] = PROGRAM,
    ) -> "SglangEngine":
        """Start a server of random weights; raises GenerationError if it does not sample."""
        arguments = server_arguments(config, model, sequence_length, seed)
        python = config.strategy_args.python
        server = SglangServer(arguments, server_environment(config), python=python, program=program)
        no_limit = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        http = httpx.AsyncClient(base_url=server.url, timeout=None, limits=no_limit, trust_env=False)
        engine = cls(server, http, model, config)
        try:
            await server.wait_ready()
            await engine.warm_up()
        except BaseException:
            engine.close()
            raise
        return engine

    def salted(self, salt: str) -> "SglangEngine":
        return SglangEngine(self._server, self._http, self._model, self._config, salt)

    async def release(self, salt: str) -> None:
        """Do nothing: the next run's weights replace those of this one."""
        del salt

    async def warm_up(self) -> None:
        """Sample two tokens; raises GenerationError if the server does not record versions."""
        request = GenerateRequest("warm-up", (0,), Sampling(max_new_tokens=2))
        answer = await self.generate(request, -1)
        if answer.error:
            raise GenerationError(f"SGLang does not sample: {answer.error}")

    async def generate(self, request: GenerateRequest, version: int) -> Completion:
        """Sample; the version is part of the prefix cache's key."""
        if request.images:
            return Completion(request.request_id, error="the prompt holds images, which sglang is not given: take vllm")
        if request.sampling.stop_strings:
            try:
                await asyncio.to_thread(load_decoder, self._model)
            except RolloutError as error:
                return Completion(request.request_id, error=str(error))
        body: dict[str, Any] = {
            "rid": request.request_id + ID_END,
            "input_ids": list(request.prompt),
            "sampling_params": _parameters(request.sampling, has_stops=has_tokenizer(self._config)),
            "return_logprob": True,
        }
        is_cut = 0 < request.sampling.top_k < self._mask_limit and request.sampling.temperature > 0
        if is_cut:
            body["return_sampling_mask"] = True
        if self._salted:
            body["extra_key"] = f"{self._salt}v{version}"
        try:
            reply = await self._post("/generate", body)
        except asyncio.CancelledError:
            self._abort_later(request.request_id)
            raise
        if reply.is_client_error:
            return Completion(request.request_id, error=_message(reply))
        if not reply.is_success:
            raise RetryableError(f"the engine failed: {_message(reply)}")
        completion = _completion(request.request_id, reply.json(), is_cut=is_cut)
        return self._end_at_stop(request, completion) if request.sampling.stop_strings else completion

    def _end_at_stop(self, request: GenerateRequest, completion: Completion) -> Completion:
        """Cut an answer behind its first stop string, which a server without tokenizer, or by its own rule, samples past."""
        stops = stop_strings_of(self._model, request.sampling.stop_strings)
        before = [*request.prompt[len(request.prompt) - request.num_answered :]]
        end = stops.find_end([*before, *completion.token_ids])
        return completion if end is None else cut_completion(completion, end - len(before))

    async def stage(self, path: Path) -> None:
        """Nothing: SGLang reads a version while it is paused."""

    async def load(self, path: Path, version: int) -> LoadTimes:
        """Load weights. For `recompute`, the pause drops the KV cache; for `keep`, the salt separates old entries."""
        recompute = self._config.on_weight_update == "recompute"
        with TemporaryDirectory(prefix="offbeat-sglang-") as folder:
            self._link_model(Path(folder), path)
            asked = time.monotonic()
            await self._command("/pause_generation", {"mode": PAUSES[self._config.on_weight_update]})
            paused = time.monotonic()
            update = {
                "model_path": folder,
                "load_format": "safetensors",  # the server's own makes random weights
                "weight_version": str(version),
                "flush_cache": recompute,
            }
            await self._command("/update_weights_from_disk", update)
            loaded = time.monotonic()
            await self._command("/continue_generation", {})
        return LoadTimes(pause_s=time.monotonic() - asked, load_s=loaded - paused)

    def _link_model(self, folder: Path, weights: Path) -> None:
        """Link the model's files, with a version's weights in place of its own."""
        for file in self._model.iterdir():
            if file.suffix not in (".safetensors", ".bin", ".pt") and not file.name.endswith(".index.json"):
                (folder / file.name).symlink_to(file.resolve())
        (folder / WEIGHTS).symlink_to(weights)

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            await self._command("/abort_request", {"rid": request_id + ID_END})

    def _abort_later(self, request_id: str) -> None:
        task = asyncio.create_task(self.abort([request_id]))
        self._aborting.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: "asyncio.Task[None]") -> None:
        self._aborting.discard(task)
        if not task.cancelled():
            task.exception()  # a server that died answers the next check

    async def sleep(self) -> None:
        """Move the weights to the host's memory and drop the KV cache."""
        await self._command("/release_memory_occupation", {})

    async def wake(self) -> None:
        await self._command("/resume_memory_occupation", {})

    def session_counts(self) -> SessionCounts:
        return SessionCounts()

    def kv_load(self) -> KvLoad:
        return KvLoad()

    async def check(self) -> None:
        if (code := self._server.exit_code) is not None:
            raise RetryableError(f"the engine died with code {code}")
        try:
            reply = await self._http.get("/health", timeout=CHECK_TIMEOUT_S)
        except httpx.TransportError as error:
            raise RetryableError(f"the engine does not answer: {error or type(error).__name__}") from error
        if not reply.is_success:
            raise RetryableError(f"the engine is unhealthy: HTTP {reply.status_code}")

    def close(self) -> None:
        self._server.close()

    async def _command(self, path: str, body: Mapping[str, Any]) -> None:
        reply = await self._post(path, body)
        if not reply.is_success:
            raise GenerationError(f"SGLang refused {path}: {_message(reply)}")

    async def _post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        try:
            return await self._http.post(path, json=body)
        except httpx.TransportError as error:
            raise RetryableError(f"the engine failed: {error or type(error).__name__}") from error


def _parameters(sampling: Sampling, *, has_stops: bool) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,  # SGLang refuses 0
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,  # where true, SGLang ignores these, too
    }
    if has_stops and sampling.stop_strings:
        parameters |= {"stop": list(sampling.stop_strings), "no_stop_trim": True}
    return parameters


def _completion(request_id: str, reply: Mapping[str, Any], *, is_cut: bool) -> Completion:
    """Return the sampled tokens; raises GenerationError if their logprobs or versions are missing.

    is_cut: take the logprobs of the tokens that `top_k` and `top_p` keep; the others are of all tokens.
    """
    meta = reply["meta_info"]
    pairs = meta.get("output_token_logprobs") or ()
    if not pairs:  # aborted before its first token
        return Completion(request_id, finish_reason=FinishReason.ABORT)
    if "weight_versions" not in meta:
        raise GenerationError(
            "this SGLang does not record which weights sampled a token (meta_info.weight_versions): install a newer one, or "
            "take vllm"
        )
    tokens = tuple(int(pair[1]) for pair in pairs)
    logprobs = tuple(map(float, meta.get(CUT_LOGPROBS, ()) if is_cut else (pair[0] for pair in pairs)))
    if len(logprobs) != len(tokens):
        raise GenerationError(
            f"SGLang does not record logprobs under top_k (meta_info.{CUT_LOGPROBS}): leave top_k out"
        )
    spans = tuple(VersionSpan(span["start"], span["end"], int(span["version"])) for span in meta["weight_versions"])
    if not spans or spans[-1].end != len(tokens):
        raise GenerationError(f"SGLang names versions of other tokens than the {len(tokens)} sampled: {list(spans)}")
    reason = FINISH_REASONS.get(meta["finish_reason"]["type"], FinishReason.LENGTH)
    return Completion(request_id, tokens, logprobs, spans, reason, cached_tokens=meta.get("cached_tokens", 0))


def _message(reply: httpx.Response) -> str:
    """Return the server's message, in either of its forms."""
    try:
        content = reply.json()
        error = content.get("error", content)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return f"HTTP {reply.status_code}"
