"""SGLang's HTTP API with a model of one number: a program with `sglang.launch_server`'s arguments.

Requests and arguments that SGLang's source does not name are refused. A step takes `STEP_S` and gives each running request
one token: the weights' number, with the logprob -1 / (number + 1).
"""

import argparse
import asyncio
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

STEP_S = 0.002
NAMES = frozenset({
    "model-path", "load-format", "weight-version", "dtype", "context-length", "max-running-requests", "tp-size", "pp-size",
    "mem-fraction-static", "random-seed", "device", "log-level", "host", "port", "schedule-policy",
    "sampling-mask-max-tokens", "speculative-algorithm",
})  # fmt: skip
FLAGS = frozenset({
    "skip-tokenizer-init", "disable-cuda-graph", "disable-radix-cache", "enable-memory-saver", "enable-weights-cpu-backup",
    "without-versions",
})  # fmt: skip
"""`without-versions` is the fake's: an SGLang before `weight_versions`."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SamplingParams(Body):
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    stop: list[str] = []
    no_stop_trim: bool = False


class Generate(Body):
    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    return_logprob: bool
    return_sampling_mask: bool = False
    extra_key: str | None = None


class Abort(Body):
    rid: str


class Pause(Body):
    mode: Literal["abort", "retract", "in_place"]


class Update(Body):
    model_path: str
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True


class Nothing(Body):
    pass


@dataclass
class Request:
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    is_aborted: bool = False


def bad_request(message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, 400)


class FakeSglang:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.number, self.version = 0, arguments.weight_version
        self.running: dict[str, Request] = {}
        self.calls: list[dict[str, Any]] = []
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.mode = ""
        self.has_memory = True

    def refuse(self, message: str) -> JSONResponse:
        return JSONResponse({"success": False, "message": message}, 400)

    async def generate(self, body: Generate) -> Any:
        top_k = body.sampling_params.top_k
        if top_k == 0:
            return bad_request(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
        if body.return_sampling_mask and top_k < 1:
            return bad_request(f"return_sampling_mask requires a finite top_k; got {top_k}")
        longest = int(self.arguments.sampling_mask_max_tokens or 4096)
        if body.return_sampling_mask and (top_k > longest or self.arguments.speculative_algorithm):
            return bad_request("return_sampling_mask is not supported")
        if body.sampling_params.stop and self.arguments.skip_tokenizer_init:
            return bad_request("stop is unavailable when skip_tokenizer_init=True")
        limit = self.arguments.context_length
        prompt, most = len(body.input_ids), body.sampling_params.max_new_tokens
        if prompt >= limit - 6 or prompt + most >= limit:
            return bad_request(f"longer than the context of {limit} tokens")
        body.sampling_params.max_new_tokens = min(most, limit - 2 - prompt)
        request = self.running[body.rid] = Request()
        try:
            reason = await self.sample(request, body.sampling_params)
        finally:
            del self.running[body.rid]
        meta: dict[str, Any] = {
            "id": body.rid,
            "finish_reason": {"type": reason},
            "output_token_logprobs": [
                [logprob, token, None] for logprob, token in zip(request.logprobs, request.tokens, strict=True)
            ],
        }
        if body.return_sampling_mask:
            meta["output_token_sampling_logprobs"] = [0.0] * len(request.tokens)
        if not self.arguments.without_versions:
            meta["weight_versions"] = request.spans
        return {"output_ids": request.tokens, "meta_info": meta}

    async def sample(self, request: Request, params: SamplingParams) -> str:
        while len(request.tokens) < params.max_new_tokens:
            await asyncio.sleep(STEP_S)
            if request.is_aborted:
                return "abort"
            if not self.may_run.is_set():
                continue
            at = len(request.tokens)
            if request.spans and request.spans[-1]["version"] == self.version:
                request.spans[-1]["end"] = at + 1
            else:
                request.spans.append({"version": self.version, "start": at, "end": at + 1})
            request.tokens.append(self.number)
            request.logprobs.append(-1 / (self.number + 1))
            if not params.ignore_eos and self.number in params.stop_token_ids:
                return "stop"
            if any(stop in self.decode(request.tokens) for stop in params.stop):
                return "stop"
        return "length"

    def decode(self, tokens: list[int]) -> str:
        """As SGLang's tokenizer of a word per token would, without the first."""
        return self.tokenizer.decode(tokens[1:], skip_special_tokens=False)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(Path(self.arguments.model_path) / "tokenizer.json"))

    async def pause(self, body: Pause) -> Any:
        self.may_run.clear()
        self.mode = body.mode
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def resume(self, body: Nothing) -> Any:
        del body
        self.may_run.set()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def update(self, body: Update) -> Any:
        if self.may_run.is_set():
            return self.refuse("an update needs a paused engine")
        if body.flush_cache and self.running and self.mode == "in_place":
            return self.refuse("Cache flush failed after updating weights")
        if (body.load_format or self.arguments.load_format) not in ("auto", "safetensors"):
            return self.refuse("Failed to get model loader")
        try:
            self.number = read_number(Path(body.model_path))
        except (OSError, ValueError, SafetensorError) as error:
            return self.refuse(f"Failed to load: {error}")
        self.version = body.weight_version or self.version
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    async def abort(self, body: Abort) -> Any:
        if body.rid in self.running:
            for rid, request in self.running.items():
                request.is_aborted |= rid.startswith(body.rid)
        return JSONResponse(None)

    async def release(self, body: Nothing) -> Any:
        del body
        if self.running or not self.arguments.enable_memory_saver:
            return bad_request("memory is released by an idle engine with a memory saver")
        self.has_memory = False
        return JSONResponse(None)

    async def resume_memory(self, body: Nothing) -> Any:
        del body
        self.has_memory = True
        return JSONResponse(None)


def read_number(folder: Path) -> int:
    """Raises ValueError unless the folder is a model with one file of weights."""
    (file,) = folder.glob("*.safetensors")
    if not (folder / "config.json").is_file():
        raise ValueError(f"no config.json in {folder}")
    with safe_open(str(file), framework="np") as weights:
        return int(weights.get_tensor("number")[0])


def make_app(fake: FakeSglang) -> FastAPI:
    app = FastAPI()

    def add(path: str, handler: Any, kind: type[Body]) -> None:
        async def handle(body: Any) -> Any:
            fake.calls.append({"path": path, **body.model_dump()})
            return await handler(body)

        handle.__annotations__["body"] = kind
        app.post(path)(handle)

    add("/generate", fake.generate, Generate)
    add("/abort_request", fake.abort, Abort)
    add("/pause_generation", fake.pause, Pause)
    add("/continue_generation", fake.resume, Nothing)
    add("/update_weights_from_disk", fake.update, Update)
    add("/release_memory_occupation", fake.release, Nothing)
    add("/resume_memory_occupation", fake.resume_memory, Nothing)

    @app.get("/health")
    async def health() -> None: ...

    @app.get("/calls")
    async def calls() -> dict[str, Any]:
        """The fake's own: what it was asked, and its state."""
        return {"calls": fake.calls, "running": len(fake.running), "has_memory": fake.has_memory}

    return app


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in NAMES:
        parser.add_argument(f"--{name}", required=name in ("model-path", "host", "port"))
    for name in FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    arguments = parser.parse_args()
    arguments.context_length = int(arguments.context_length)
    app = make_app(FakeSglang(arguments))
    # running requests do not delay its end
    uvicorn.run(app, host=arguments.host, port=int(arguments.port), log_level="critical", timeout_graceful_shutdown=0)


if __name__ == "__main__":
    main()
