"""The real engine's experts: those of transformers' routers in float32, and in bfloat16 those that make the learner's
logprobs the engine's.
"""

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.services.generation.config import EngineModelArgs, GenerationConfig
from offbeat.services.generation.vllm.engine import VllmEngine
from offbeat.services.messages.codec import decode_completions, encode_completions
from offbeat.services.messages.types import Completion, GenerateRequest, Sampling, VersionSpan
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.packing import PackedInput
from tests.integration.policy_weights import save_weights
from tests.qwen3_moe import EXPERTS, LAYERS, TOP_K, write_qwen3_moe

pytestmark = pytest.mark.timeout(300)

PROMPT = tuple(range(20, 60))
TEXTS = ("up down left right " * 50,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    write_qwen3_moe(path, TEXTS)
    return path


@asynccontextmanager
async def serving(folder: Path, dtype: Any, **settings: Any) -> AsyncIterator[VllmEngine]:
    environment = dict(os.environ)
    config = GenerationConfig(model_args=EngineModelArgs(dtype=dtype), kv_cache_gib=0.1, **settings)
    config = config.with_engine(enable_return_routed_experts=True)
    engine = await VllmEngine.start(config, folder, sequence_length=512, seed=1)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        await asyncio.sleep(0)
        gc.collect()  # vLLM's client wants to be gone before the interpreter is
        os.environ.clear()
        os.environ.update(environment)


def inputs(prompt: tuple[int, ...], completion: Completion) -> PackedInput:
    tokens = torch.tensor([*prompt, *completion.token_ids])
    positions = torch.arange(len(prompt), len(tokens))
    return PackedInput.of(tokens, torch.tensor([0, len(tokens)]), positions)


def routing_of(completion: Completion) -> Tensor:
    assert completion.routing is not None
    rows = torch.from_numpy(completion.routing.astype(np.int16))
    return torch.cat([rows, torch.full((1, LAYERS, TOP_K), -1, dtype=torch.int16)])  # of the last token


async def sample(engine: VllmEngine, name: str, prompt: tuple[int, ...], version: int, tokens: int = 24) -> Completion:
    request = GenerateRequest(name, prompt, Sampling(max_new_tokens=tokens), version, episode=name, continues=True)
    return await engine.generate(request, version)


@pytest.mark.parametrize("on_weight_update", ["keep", "recompute"])
async def test_experts_are_those_of_the_model_in_later_turns_and_after_updates(
    on_weight_update: str, folder: Path, tmp_path: Path
) -> None:
    """A second turn's prompt is in the cache, and an update comes amid an answer."""
    policy = load_policy(folder, ModelArgs(), seed=1)
    files = [save_weights(policy.model, tmp_path / "0.st")]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    files.append(save_weights(policy.model, tmp_path / "1.st"))
    async with serving(folder, "float32", on_weight_update=on_weight_update) as engine:
        await engine.stage(files[0])
        await engine.load(files[0], 0)
        running = asyncio.create_task(sample(engine, "amid", PROMPT, 0, tokens=200))
        await sample(engine, "before", PROMPT, 0)
        await engine.stage(files[1])
        await engine.load(files[1], 1)
        amid = await running
        first = await sample(engine, "a", PROMPT, 1)
        longer = (*PROMPT, *first.token_ids, 61, 62)
        later = await sample(engine, "a", longer, 1)
        request = GenerateRequest("b", longer, Sampling(max_new_tokens=24), 1, routing_start=50)
        rest = await engine.generate(request, 1)
    assert later.cached_tokens >= 32
    assert rest.routing is not None
    assert later.routing is not None
    assert np.array_equal(rest.routing[: len(longer) - 50], later.routing[50 : len(longer)])
    assert len(rest.routing) == len(longer) + 24 - 1 - 50
    chosen: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, __, outputs: chosen.append(outputs[2]))
        for module in policy.modules()
        if type(module).__name__ == "Qwen3MoeTopKRouter"
    ]
    for prompt, completion in ((PROMPT, first), (longer, later)):
        chosen.clear()
        with torch.no_grad():
            policy(inputs(prompt, completion))
        expected = torch.stack(chosen, 1)[:-1].sort(-1).values
        assert torch.equal(routing_of(completion)[:-1].long().sort(-1).values, expected)
    for hook in hooks:
        hook.remove()
    assert [span.version for span in amid.versions] == [0, 1]
    assert amid.routing is not None
    assert amid.routing.shape == (len(PROMPT) + 200 - 1, LAYERS, TOP_K)
    assert len(np.unique(amid.routing)) == EXPERTS


async def test_replayed_experts_bring_the_learners_logprobs_to_the_engines(folder: Path, tmp_path: Path) -> None:
    policy = load_policy(folder, ModelArgs(dtype="bfloat16"), seed=1)
    file = save_weights(policy.model, tmp_path / "0.st")
    async with serving(folder, "bfloat16") as engine:
        await engine.load(file, 0)
        completions = await asyncio.gather(*(sample(engine, str(n), PROMPT[n:], 0, 64) for n in range(8)))
    differences: list[Tensor] = []
    for n, completion in enumerate(completions):
        assert decode_completions(encode_completions([completion])) == [replace(completion, cached_tokens=0)]
        assert completion.versions == (VersionSpan(0, 64, 0),)
        x = inputs(PROMPT[n:], completion)
        with torch.no_grad():
            own, replayed = (policy(replace(x, routing=given))[0] for given in (None, routing_of(completion)))
        sampled = torch.tensor(completion.logprobs)
        differences.append(torch.stack([own - sampled, replayed - sampled]))
    own, replayed = (torch.cat(differences, 1) ** 2 / 2).mean(1)
    assert replayed < own / 5
