"""Policies on the CPU."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from offbeat.deploy.config.errors import ConfigError
from offbeat.services.chat.stops import cut_completion, stop_strings_of
from offbeat.services.messages.types import (
    Completion,
    FinishReason,
    PromptImage,
    VersionSpan,
)
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.training.checkpoint import describe, is_checkpoint, read_uploaded, writing_order

CHECKPOINTS = "checkpoints"


def policy_folder(path: Path) -> Path:
    """Return the model folder of a Hugging Face folder, checkpoint, or run (the last written); raises `ConfigError`."""
    if (path / "config.json").is_file():
        if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
            raise ConfigError([ConfigIssue("", f"{path} holds a model's configuration but no weights")])
        return path
    checkpoints = [
        each.parent for each in (path / CHECKPOINTS).glob("step-*/config.json") if is_checkpoint(each.parent)
    ]
    if checkpoints:
        return max(checkpoints, key=lambda each: writing_order(describe(each)))
    if (path / "adapter_config.json").is_file():
        message = f"{path} is an adapter without its base: name the run or checkpoint, whose weights hold both"
        raise ConfigError([ConfigIssue("", message)])
    url, uploaded = read_uploaded(path / CHECKPOINTS)
    if uploaded:
        message = (
            f"the checkpoints of {path} are only in a store: download {url}/{uploaded[-1].name}, and name its folder"
        )
        raise ConfigError([ConfigIssue("", message)])
    raise ConfigError([ConfigIssue("", f"{path} is neither a model folder (config.json) nor a run with checkpoints")])


def parse_version(folder: Path) -> int:
    """Parse a checkpoint folder's version; default 0."""
    match = re.fullmatch(r"step-(\d+)", folder.name)
    return int(match[1]) if match else 0


class PromptRequest(NamedTuple):
    prompt: tuple[int, ...]
    max_tokens: int
    images: tuple[PromptImage, ...] = ()


class SamplingParams(NamedTuple):
    """Temperature 0 is greedy, `top_k` below 1 unlimited."""

    temperature: float
    top_p: float
    top_k: int


class Policy(Protocol):
    """Completion of token prompts; not thread-safe."""

    def complete(self, requests: Sequence[PromptRequest], params: SamplingParams) -> list[Completion]: ...


class TransformersPolicy:
    def __init__(self, folder: Path, stop_ids: Sequence[int], *, seed: int) -> None:
        import torch
        from transformers import GenerationConfig
        from transformers.utils.logging import disable_progress_bar

        from offbeat.trainer.models.loading import policy_loader

        disable_progress_bar()
        self._torch = torch
        self._model: Any = (
            policy_loader(folder).from_pretrained(folder, local_files_only=True, trust_remote_code=False).float().eval()
        )
        self._model.generation_config = GenerationConfig()  # as in the engine, the folder's file does not apply
        self._stop_ids = tuple(stop_ids)
        self._version = parse_version(folder)
        self.seed(seed)

    def seed(self, seed: int) -> None:
        self._torch.manual_seed(seed)

    def complete(self, requests: Sequence[PromptRequest], params: SamplingParams) -> list[Completion]:
        from offbeat.deploy.play.token_sampling import LogprobRecorder, make_warpers

        prompts, max_tokens = [request.prompt for request in requests], [request.max_tokens for request in requests]
        torch, longest = self._torch, max(map(len, prompts))
        pad = self._stop_ids[0]
        ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if params.temperature > 0:  # applied before the recorder
            options = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        warpers, recorder = make_warpers(*params), LogprobRecorder()
        warpers.append(cast(Any, recorder))
        with torch.inference_mode():
            sequences = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(max_tokens),
                eos_token_id=list(self._stop_ids),
                pad_token_id=pad,
                logits_processor=warpers,
                **options,
            )
            logprobs = recorder.finish(sequences)
        rows = zip(sequences[:, longest:].tolist(), logprobs.tolist(), max_tokens, strict=True)
        return [
            build_completion(tokens[:count], values[:count], self._stop_ids, self._version)
            for tokens, values, count in rows
        ]


def build_completion(
    tokens: Sequence[int], logprobs: Sequence[float], stop_ids: Sequence[int], version: int
) -> Completion:
    """Truncate at the first stop token."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), None)
    length = end or len(tokens)
    return Completion(
        request_id="",
        token_ids=tuple(tokens[:length]),
        logprobs=tuple(logprobs[:length]),
        versions=(VersionSpan(0, length, version),),
        finish_reason=FinishReason.STOP if end else FinishReason.LENGTH,
    )


class BatchingSampler:
    def __init__(
        self,
        policy: Policy,
        params: SamplingParams,
        *,
        max_new_tokens: int,
        stop_strings: tuple[str, ...] = (),
        folder: Path = Path(),
    ) -> None:
        """folder: of the policy's tokenizer, for stop strings."""
        self._stop_strings = stop_strings
        self._folder = folder
        self._policy = policy
        self._params = params
        self._max_new_tokens = max_new_tokens
        self._waiting: list[tuple[PromptRequest, asyncio.Future[Completion]]] = []
        self._task: asyncio.Task[None] | None = None

    async def __call__(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        images: tuple[PromptImage, ...] = (),
        *,
        stop_strings: tuple[str, ...] = (),
    ) -> Completion:
        """Sample, to the limit; cut at the first stop string."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((PromptRequest(tuple(prompt), min(max_tokens, self._max_new_tokens), images), future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._complete_batches())
        completion: Completion = await future
        if not (texts := (*self._stop_strings, *stop_strings)):
            return completion
        stops = await asyncio.to_thread(stop_strings_of, self._folder, texts)
        end = stops.find_end(completion.token_ids)
        return completion if end is None else cut_completion(completion, end)

    async def _complete_batches(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # let all turns that are ready in this iteration of the event loop join
            batch, self._waiting = self._waiting, []
            requests, futures = zip(*batch, strict=True)
            try:
                answers = await asyncio.to_thread(self._policy.complete, requests, self._params)
            except Exception as error:
                # Raised in every waiting episode.
                for future in futures:
                    if not future.done():
                        future.set_exception(error)
                continue
            for future, answer in zip(futures, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
