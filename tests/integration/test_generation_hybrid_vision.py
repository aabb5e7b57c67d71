"""The real engine and the learner's model agree about images where layers are recurrent (Qwen3.5), up to bfloat16."""

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from offbeat.services.chat.vision import ImageProcessor, encode_png
from offbeat.services.generation.config import EngineModelArgs, GenerationConfig
from offbeat.services.generation.vllm.engine import VllmEngine
from offbeat.services.messages.types import Completion, GenerateRequest, PromptImage, Sampling
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.policy import PackedPolicy
from tests.families import write_vision_policy
from tests.integration.policy_weights import save_weights

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("engine_forks"),
]

NOISE, OTHER_WEIGHTS = 0.05, 0.15
"""Mean differences of logprobs: bfloat16's, and what other weights or images exceed."""
MODEL_ARGS = ModelArgs(image_input=True)
CONFIG = GenerationConfig(
    model_args=EngineModelArgs(dtype="bfloat16", image_input=True), kv_cache_gib=0.1, keep_sessions=True
)
WORDS = [f"w{i}" for i in range(100)]
LONG = tuple((7 * n) % 90 + 12 for n in range(600))
"""A prefix of more tokens than a block of the engine has, which are reused whole."""


class Policies:
    """Two sets of weights, and the engine that serves one of them."""

    def __init__(self, engine: VllmEngine, folder: Path, files: Path) -> None:
        self.engine = engine
        self.reader = ImageProcessor(folder)
        self.models = [load_policy(folder, MODEL_ARGS, seed).eval() for seed in range(2)]
        for seed, policy in enumerate(self.models):
            torch.manual_seed(seed)
            for parameter in policy.parameters():
                torch.nn.init.normal_(parameter, 0, 0.2)
            policy.bfloat16()
        self.files = [save_weights(policy.model, files / f"{i}.st") for i, policy in enumerate(self.models)]
        for policy in self.models:
            policy.float()
        self.version = -1
        self._requests = 0

    async def load(self, index: int, *, staged: bool = True) -> None:
        """Serve these weights as a new version."""
        if staged:
            await self.engine.stage(self.files[index])
        self.version += 1
        await self.engine.load(self.files[index], self.version)

    async def generate(self, *parts: int | bytes, episode: str = "") -> tuple[GenerateRequest, Completion]:
        """Answer a prompt of token ids and images."""
        prompt, images = list[int](), list[PromptImage]()
        for part in parts:
            if isinstance(part, bytes):
                images.append(PromptImage(len(prompt), self.reader.count(part), part))
                prompt += [self.reader.image_token_id] * images[-1].count
            else:
                prompt.append(part)
        self._requests += 1
        name, sampling = f"r{self._requests}", Sampling(max_new_tokens=40)
        settings = {"episode": episode, "continues": True} if episode else {}
        request = GenerateRequest(name, tuple(prompt), sampling, images=tuple(images), **settings)
        return request, await self.engine.generate(request, self.version)


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=("qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.nightly))
)
async def policies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Policies]:
    folder = tmp_path_factory.mktemp("policy")
    write_vision_policy(folder, request.param, WORDS, max_position_embeddings=1024)
    engine = await VllmEngine.start(CONFIG, folder, sequence_length=1024, seed=1)
    policies = Policies(engine, folder, tmp_path_factory.mktemp("weights"))
    try:
        yield policies
    finally:
        await engine.sessions.close_all()
        engine.close()
        vars(policies).clear()
        del engine
        await asyncio.sleep(0)
        gc.collect()


def random_image(seed: int, rows: int, columns: int) -> bytes:
    return encode_png(np.random.default_rng(seed).integers(0, 256, (32 * rows, 32 * columns, 3), dtype=np.uint8))


def mismatch(policy: PackedPolicy, request: GenerateRequest, completion: Completion) -> float:
    """Mean difference between the engine's logprobs and the learner's, which packs the sequence with another one."""
    assert not completion.error, completion.error
    tokens = torch.tensor((*request.prompt, *completion.token_ids, 12, 13))
    length = len(tokens) - 2
    positions = torch.arange(len(request.prompt), length)
    x = PackedInput.of(tokens, torch.tensor([0, length, len(tokens)]), positions, images=request.images)
    with torch.no_grad():
        return float((policy(x).logprobs - torch.tensor(completion.logprobs)).abs().mean())


async def test_the_engine_sees_what_the_learner_sees_under_each_version(policies: Policies) -> None:
    """Whether a version was staged or is loaded in the pause, with several images and prompts at a time."""
    first, second = random_image(1, 2, 3), random_image(2, 4, 4)
    prompts = [(12, first, 13), (12, 13, second, 14, first, 15), (first, 13, first, 15), (12, 13, 14)]
    for index, staged in ((0, True), (1, True), (0, False)):
        await policies.load(index, staged=staged)
        for request, completion in await asyncio.gather(*(policies.generate(*prompt) for prompt in prompts)):
            assert mismatch(policies.models[index], request, completion) < NOISE
            assert mismatch(policies.models[1 - index], request, completion) > OTHER_WEIGHTS


async def test_an_answer_depends_on_the_image(policies: Policies) -> None:
    await policies.load(0)
    request, completion = await policies.generate(12, random_image(1, 3, 3), 13)
    (image,) = request.images
    other = PromptImage(image.start, image.count, random_image(5, 3, 3))
    request = GenerateRequest("other", request.prompt, request.sampling, images=(other,))
    assert mismatch(policies.models[0], request, completion) > OTHER_WEIGHTS


async def test_a_cached_prefix_with_an_image_gives_the_logprobs_of_a_computed_one(policies: Policies) -> None:
    """A block is reused if its image is the same, too, and no longer under new weights."""
    await policies.load(0)
    shown, other = random_image(3, 4, 3), random_image(4, 4, 3)
    for tail, image, cached in (((15,), shown, False), ((15, 16, 17), shown, True), ((15, 16), other, False)):
        request, completion = await policies.generate(12, 13, image, *LONG, *tail)
        assert (completion.cached_tokens > 0) is cached
        assert mismatch(policies.models[0], request, completion) < NOISE
    await policies.load(1)
    request, completion = await policies.generate(12, 13, shown, *LONG, 15)
    assert completion.cached_tokens == 0
    assert mismatch(policies.models[1], request, completion) < NOISE


async def test_an_episode_leaves_its_session_when_it_shows_an_image(policies: Policies) -> None:
    await policies.load(0)
    sessions, shown = policies.engine.sessions, random_image(6, 2, 2)
    text, said = await policies.generate(12, 13, 14, episode="episode")
    assert mismatch(policies.models[0], text, said) < NOISE
    continued, parts = sessions.num_continued, (*text.prompt, *said.token_ids, 15)
    request, completion = await policies.generate(*parts, shown, 16, episode="episode")
    assert sessions.num_continued == continued
    assert mismatch(policies.models[0], request, completion) < NOISE
    await sessions.close_all()
