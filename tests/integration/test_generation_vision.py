"""The real engine and the learner's model agree on every token about images, before and after an update."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import save_file

from offbeat.services.chat.vision import ImageProcessor, encode_png
from offbeat.services.generation.config import EngineModelArgs, GenerationConfig
from offbeat.services.generation.vllm.engine import VllmEngine
from offbeat.services.messages.types import (
    Completion,
    GenerateRequest,
    PromptImage,
    Sampling,
)
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig, TinyVisionConfig
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import PackedPolicy
from offbeat.trainer.models.tiny import write_tiny_policy

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLOAT_NOISE = 5e-5
CONFIG = GenerationConfig(model_args=EngineModelArgs(dtype="float32"), kv_cache_gib=0.25)
WORDS = tuple(f"w{i}" for i in range(20))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    write_tiny_policy(folder, TinyPolicyConfig(num_hidden_layers=2, vision=TinyVisionConfig()), WORDS)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[VllmEngine]:
    environment = dict(os.environ)
    engine = await VllmEngine.start(CONFIG, folder, sequence_length=256, seed=1)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        await asyncio.sleep(0)
        gc.collect()
        os.environ.clear()
        os.environ.update(environment)


def random_image(seed: int, rows: int, columns: int) -> bytes:
    return encode_png(np.random.default_rng(seed).integers(0, 256, (32 * rows, 32 * columns, 3), dtype=np.uint8))


def request_of(name: str, pad: int, *pngs: tuple[bytes, int]) -> GenerateRequest:
    """Images with words between them."""
    prompt, images = [2, 9], list[PromptImage]()
    for png, count in pngs:
        images.append(PromptImage(len(prompt) + 1, count, png))
        prompt += [4, *[pad] * count, 5, 12, 13]
    return GenerateRequest(name, (*prompt, 3, 2, 10), Sampling(max_new_tokens=24), images=tuple(images))


def mismatch(policy: PackedPolicy, request: GenerateRequest, completion: Completion) -> float:
    """Largest difference between the engine's logprobs and the learner's."""
    assert not completion.error, completion.error
    tokens = torch.tensor(request.prompt + completion.token_ids)
    positions = torch.arange(len(request.prompt), len(tokens))
    x = PackedInput.of(tokens, torch.tensor([0, len(tokens)]), positions, images=request.images)
    with torch.no_grad():
        return float((policy(x).logprobs - torch.tensor(completion.logprobs)).abs().max())


async def test_the_engine_sees_what_the_learner_sees_under_each_version(
    engine: VllmEngine, folder: Path, tmp_path: Path
) -> None:
    reader = ImageProcessor(folder)
    policies = [load_policy(folder, ModelArgs(), seed) for seed in (0, 1)]
    pngs = [(png, reader.count(png)) for png in (random_image(1, 2, 3), random_image(2, 4, 4), random_image(3, 5, 1))]
    requests = [
        request_of("one", reader.image_token_id, pngs[0]),
        request_of("two", reader.image_token_id, pngs[1], pngs[2]),
        request_of("again", reader.image_token_id, pngs[0], pngs[0]),
    ]
    for version, policy in enumerate(policies):
        path = tmp_path / f"{version}.safetensors"
        save_file({name: weight.detach().clone() for name, weight in policy.model.named_parameters()}, path)
        await engine.stage(path)
        await engine.load(path, version)
        answers = await asyncio.gather(*(engine.generate(request, version) for request in requests))
        # the prefix cache and the vision tower's cache hold nothing of the other version
        for request, answer in zip(requests, answers, strict=True):
            assert mismatch(policy, request, answer) < FLOAT_NOISE
            assert mismatch(policies[1 - version], request, answer) > 0.01


async def test_an_image_that_the_prompt_does_not_fit_is_refused(engine: VllmEngine, folder: Path) -> None:
    reader = ImageProcessor(folder)
    request = request_of("odd", reader.image_token_id, (random_image(1, 2, 2), 5))
    assert "an image of 4 tokens is given 5" in (await engine.generate(request, 0)).error
