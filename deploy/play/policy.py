"""A policy on this machine's CPU, through transformers; many episodes' turns are sampled together."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from offbeat.deploy.config.errors import ConfigError
from offbeat.services.messages.types import (
    Completion,
    FinishReason,
    Picture,
    VersionSpan,
)
from offbeat.trainer.config.issue import ConfigIssue

CHECKPOINTS = "checkpoints"


def policy_folder(path: Path) -> Path:
    """Return the model folder of `path`: a Hugging Face folder, a checkpoint, or a run with checkpoints.

    Raises:
        ConfigError: there is none.
    """
    if (path / "config.json").is_file():
        if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
            raise ConfigError([ConfigIssue("", f"{path} holds a model's configuration and no weights")])
        return path
    steps = sorted((path / CHECKPOINTS).glob("step-*/config.json"))
    if steps:
        return steps[-1].parent
    raise ConfigError([ConfigIssue("", f"{path} is no model folder (config.json) and no run with checkpoints")])


def version_of(folder: Path) -> int:
    """Return the version in a checkpoint folder's name; 0 for any other model."""
    found = re.fullmatch(r"step-(\d+)", folder.name)
    return int(found[1]) if found else 0


class PromptRequest(NamedTuple):
    """Request for one completion."""

    prompt: tuple[int, ...]
    most: int
    """New tokens."""
    pictures: tuple[Picture, ...] = ()


class SamplingParams(NamedTuple):
    """Sampling parameters; temperature 0 is greedy, `top_k` below 1 is the whole vocabulary."""

    temperature: float
    top_p: float
    top_k: int


class Policy(Protocol):
    """Answers prompts of tokens. Not thread-safe."""

    def complete(self, asked: Sequence[PromptRequest], chance: SamplingParams) -> list[Completion]:
        """Return one completion for each prompt."""
        ...


class TransformersPolicy:
    """Answers prompts of text. Not thread-safe."""

    def __init__(self, folder: Path, stop_ids: Sequence[int], *, seed: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).float().eval()
        self._stop_ids = tuple(stop_ids)
        self._version = version_of(folder)
        torch.manual_seed(seed)

    def complete(self, asked: Sequence[PromptRequest], chance: SamplingParams) -> list[Completion]:
        prompts, most = [each.prompt for each in asked], [each.most for each in asked]
        torch, longest = self._torch, max(map(len, prompts))
        pad = self._stop_ids[0]
        ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        how: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if chance.temperature > 0:
            how = {**chance._asdict(), "do_sample": True, "top_k": max(chance.top_k, 0)}
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(most),
                eos_token_id=list(self._stop_ids),
                pad_token_id=pad,
                output_scores=True,
                return_dict_in_generate=True,
                **how,
            )
        sampled = out.sequences[:, longest:]
        logprobs = torch.stack(out.scores, dim=1).float().log_softmax(dim=-1)
        chosen = logprobs.gather(-1, sampled.unsqueeze(-1)).squeeze(-1)
        rows = zip(sampled.tolist(), chosen.tolist(), most, strict=True)
        return [
            completion_of(tokens[:count], values[:count], self._stop_ids, self._version)
            for tokens, values, count in rows
        ]


def completion_of(
    tokens: Sequence[int], logprobs: Sequence[float], stop_ids: Sequence[int], version: int
) -> Completion:
    """Return the tokens up to the first stop token."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), None)
    length = end or len(tokens)
    return Completion(
        request_id="",
        token_ids=tuple(tokens[:length]),
        logprobs=tuple(logprobs[:length]),
        versions=(VersionSpan(0, length, version),),
        finish_reason=FinishReason.STOP if end else FinishReason.LENGTH,
    )


class TogetherSampler:
    """Collects the turns that are ready and has them answered in one batch, in a thread."""

    def __init__(self, policy: Policy, chance: SamplingParams, *, max_new_tokens: int) -> None:
        self._policy = policy
        self._chance = chance
        self._most = max_new_tokens
        self._waiting: list[tuple[PromptRequest, asyncio.Future[Completion]]] = []
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, prompt: Sequence[int], most: int, pictures: tuple[Picture, ...] = ()) -> Completion:
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((PromptRequest(tuple(prompt), min(most, self._most), pictures), future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._answer_all())
        return await future

    async def _answer_all(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # all that became ready in this round of the loop travel together
            batch, self._waiting = self._waiting, []
            asked, futures = zip(*batch, strict=True)
            try:
                answers = await asyncio.to_thread(self._policy.complete, asked, self._chance)
            except Exception as error:
                # Each episode hears of it; none is left waiting.
                for future in futures:
                    if not future.done():
                        future.set_exception(error)
                continue
            for future, answer in zip(futures, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
