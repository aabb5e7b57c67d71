"""The load of a real engine's KV cache: what requests hold, and those that it preempts."""

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from offbeat.services.generation.config import EngineModelArgs, GenerationConfig
from offbeat.services.generation.vllm.engine import VllmEngine
from offbeat.services.messages.types import Completion, GenerateRequest, Sampling
from tests.integration.policy_weights import random_policy, save_weights, write_policy

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("engine_forks"),
]

ANSWER = 96
CONFIG = GenerationConfig(model_args=EngineModelArgs(dtype="float32"), kv_cache_gib=0.003, keep_sessions=True)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_policy(tmp_path_factory.mktemp("load"))
    return save_weights(random_policy(folder, 0), folder / "weights.safetensors")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(weights: Path) -> AsyncIterator[VllmEngine]:
    """Of a KV cache for a few sequences."""
    engine = await VllmEngine.start(CONFIG, weights.parent, sequence_length=256, seed=0)
    await engine.stage(weights)
    await engine.load(weights, 0)
    yield engine
    engine.close()
    gc.collect()


async def play(engine: VllmEngine, number: int, name: str) -> list[Completion]:
    def request(index: int) -> GenerateRequest:
        prompt = tuple(4 + (index * 7 + place) % 24 for place in range(100))
        return GenerateRequest(f"{name}-{index}", prompt, Sampling(max_new_tokens=ANSWER), episode="")

    return await asyncio.gather(*(engine.generate(request(index), 0) for index in range(number)))


async def test_requests_that_fit_are_not_preempted_and_others_are(engine: VllmEngine) -> None:
    tokens = engine.kv_load().tokens
    assert 500 < tokens < 2000
    await play(engine, tokens // 256, "few")
    few = engine.kv_load()
    assert few.preemptions == 0
    assert 0.0 < few.usage < 1.0
    completions = await play(engine, 8 * tokens // 256, "many")
    many = engine.kv_load()
    assert many.preemptions == many.recent_preemptions > 0
    assert few.usage < many.usage <= 1.0
    assert all(len(each.token_ids) == ANSWER for each in completions)


async def test_requests_recomputed_under_new_weights_are_not_preempted(engine: VllmEngine, weights: Path) -> None:
    recompute = CONFIG.model_copy(update={"on_weight_update": "recompute"})
    recomputing = VllmEngine(engine.llm, recompute, sessions=engine.sessions)
    before = engine.kv_load().preemptions
    running = asyncio.create_task(play(recomputing, 2, "recomputed"))
    await recomputing.generate(GenerateRequest("short", (5, 6, 7), Sampling(max_new_tokens=8), episode=""), 0)
    await recomputing.load(weights, 1)
    for completion in await running:
        assert len(completion.versions) == 2
    assert engine.kv_load().preemptions == before
    await play(recomputing, 8 * engine.kv_load().tokens // 256, "crowded")
    assert engine.kv_load().preemptions > before, "others still count"


async def test_a_session_between_its_turns_is_not_in_use(engine: VllmEngine) -> None:
    prompt = tuple(4 + place % 24 for place in range(120))
    await engine.generate(GenerateRequest("a-1", prompt, Sampling(max_new_tokens=4), episode="a", continues=True), 0)
    assert engine.session_counts().waiting == 1
    await asyncio.sleep(0)
    assert engine.sessions.kept_share > 0
    assert engine.kv_load().usage <= 1.0 - engine.sessions.kept_share
