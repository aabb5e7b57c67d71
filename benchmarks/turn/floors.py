"""Floors of a turn: bare AsyncLLM, the forward pass alone, the env alone; each in a process of its own.

Invariant: prompts and answers have the lengths of the episodes that the mesh played in the same round.
"""

# pyright: basic
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.services.generation.config import Dtype, GenerationConfig
from offbeat.services.messages.types import Trajectory

GROUP_SIZE = 8
"""Episodes with one first prompt."""


@dataclass(frozen=True, slots=True)
class EpisodeShape:
    """Mean lengths, in tokens."""

    turns: int
    first: int
    """Before the first answer."""
    chunk: int
    """Between answers."""
    answer: int

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> "EpisodeShape":
        turns = [turn for each in trajectories for turn in each.turns]
        chunks = [b.start - a.end for each in trajectories for a, b in zip(each.turns, each.turns[1:], strict=False)]
        return cls(
            turns=max(1, round(len(turns) / len(trajectories))),
            first=round(sum(each.turns[0].start for each in trajectories) / len(trajectories)),
            chunk=round(sum(chunks) / len(chunks)) if chunks else 1,
            answer=max(1, round(sum(turn.end - turn.start for turn in turns) / len(turns))),
        )

    @property
    def length(self) -> int:
        return self.first + self.turns * (self.answer + self.chunk)


class BareTurns:
    """AsyncLLM with callers in its own process; a turn is asked as soon as the last one is answered."""

    def __init__(
        self, config: GenerationConfig, model: Path, sequence_length: int, environment: dict[str, str]
    ) -> None:
        self._config = config
        self._model = model
        self._sequence_length = sequence_length
        self._environment = environment

    async def start(self) -> None:
        from offbeat.services.generation.vllm.engine import VllmEngine

        os.environ.update(self._environment, VLLM_WORKER_MULTIPROC_METHOD="spawn")  # as in a replica
        engine = await VllmEngine.start(self._config, self._model, sequence_length=self._sequence_length, seed=0)
        self._llm, self._vocab_size = engine.llm, engine.llm.model_config.get_vocab_size()
        self._draw = random.Random(0)

    async def play(self, shape: EpisodeShape, count: int, seconds: float) -> tuple[int, float]:
        """Play for `seconds` with `count` episodes at a time; return turns and wall time."""
        import asyncio

        began = time.monotonic()
        firsts = [self._tokens(shape.first) for _ in range(-(-count // GROUP_SIZE))]
        places = (self._episodes(shape, firsts[n // GROUP_SIZE], f"{began}-{n}", began + seconds) for n in range(count))
        turns = sum(await asyncio.gather(*places))
        return turns, time.monotonic() - began

    async def _episodes(self, shape: EpisodeShape, first: list[int], name: str, end: float) -> int:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            max_tokens=shape.answer, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY, skip_clone=True,
        )  # fmt: skip
        turns, ids = 0, list(first)
        while True:
            async for output in self._llm.generate(tokens_input(list(ids)), parameters, f"{name}-{turns}"):
                answer = output.outputs[0].token_ids
            turns += 1
            if time.monotonic() >= end:
                return turns
            ids = [*ids, *answer, *self._tokens(shape.chunk)] if turns % shape.turns else list(first)

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(self._vocab_size) for _ in range(count)]

    def close(self) -> None:
        self._llm.shutdown(timeout=0.5)


class ForwardAlone:
    """The player of TRL's side: transformers with each episode's keys and values, all episodes in step."""

    def __init__(self, model: Path, dtype: Dtype, device: str, threads: int) -> None:
        self._model = model
        self._dtype = dtype
        self._device = device
        self._threads = threads

    async def start(self) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(self._threads)
        if self._device != "cpu":  # a default costs each operation time
            torch.set_default_device(self._device)
        config = AutoConfig.from_pretrained(self._model, trust_remote_code=False)
        dtype = getattr(torch, self._dtype)
        # any weights cost the same
        policy = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        self._policy: Any = policy.eval()
        self._draw = random.Random(0)

    async def play(self, shape: EpisodeShape, count: int, seconds: float) -> tuple[int, float]:
        import torch

        from offbeat.benchmarks.peer.trl_worker.kv_store import Store
        from offbeat.benchmarks.peer.trl_worker.rollouts import sample_tokens

        store, slots = Store(self._policy, count, shape.length), list(range(count))
        began, turns = time.monotonic(), 0
        with torch.inference_mode():
            while True:
                turn = turns // count % shape.turns
                if turn == 0:
                    store.clear()
                width = shape.chunk if turn else shape.first
                chunks = [[self._draw.randrange(self._policy.config.vocab_size)] * width for _ in slots]
                for _ in range(shape.answer):
                    chunks = [[token] for token in sample_tokens(store.feed(slots, chunks))]
                turns += count
                if time.monotonic() >= began + seconds:
                    return turns, time.monotonic() - began

    def close(self) -> None: ...


class EnvAlone:
    async def start(self) -> None:
        from offbeat.envs.frozen_lake.env import FrozenLakeConfig, FrozenLakeEnv

        self._env = FrozenLakeEnv(FrozenLakeConfig())

    async def play(self, shape: EpisodeShape, count: int, seconds: float) -> tuple[int, float]:
        del count
        began, turns = time.monotonic(), 0
        while time.monotonic() < began + seconds:
            self._env.reset(seed=turns)
            for _ in range(shape.turns):
                self._env.step("")
            turns += shape.turns
        return turns, time.monotonic() - began

    def close(self) -> None: ...
