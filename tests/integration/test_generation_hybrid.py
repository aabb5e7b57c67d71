"""The real engine with recurrent layers: its logprobs are the model's, up to bfloat16."""

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from offbeat.services.generation.config import EngineModelArgs, GenerationConfig
from offbeat.services.generation.vllm.engine import VllmEngine
from offbeat.services.generation.vllm.sessions import Sessions
from offbeat.services.messages.types import Completion, FinishReason, GenerateRequest, Sampling
from tests.integration.hybrid_policy import random_hybrid, write_hybrid
from tests.integration.policy_weights import mismatch, save_weights

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("engine_forks"),
]

NOISE, OTHER_WEIGHTS = 0.05, 0.15
"""Mean differences of logprobs: bfloat16's, and what other weights exceed."""
CONFIG = GenerationConfig(model_args=EngineModelArgs(dtype="bfloat16"), kv_cache_gib=0.1, keep_sessions=True)
PROMPT = tuple(range(4, 28)) * 4
LFM2 = {
    "conv_dim": 64,
    "block_dim": 64,
    "block_ff_dim": 64,
    "block_multiple_of": 1,
    "block_ffn_dim_multiplier": 1.0,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""vLLM reads sizes by the names of published folders."""


class Policies:
    """Two sets of weights, and the engine that serves one of them."""

    def __init__(self, engine: VllmEngine, folder: Path, files: Path) -> None:
        self.engine = engine
        self.recomputing = VllmEngine(engine.llm, CONFIG.model_copy(update={"on_weight_update": "recompute"}))
        models = [random_hybrid(folder, seed).bfloat16() for seed in range(2)]
        self.files = [save_weights(model, files / f"{i}.safetensors") for i, model in enumerate(models)]
        self.models = [model.float() for model in models]
        self.version = -1
        self._requests = 0

    async def load(self, index: int, engine: VllmEngine | None = None, *, staged: bool = True) -> int:
        """Serve these weights as a new version."""
        engine = engine or self.engine
        if staged:
            await engine.stage(self.files[index])
        self.version += 1
        await engine.load(self.files[index], self.version)
        return self.version

    def request(self, prompt: tuple[int, ...], **sampling: Any) -> GenerateRequest:
        self._requests += 1
        return GenerateRequest(f"r{self._requests}", prompt, Sampling(**sampling))

    async def generate(self, request: GenerateRequest) -> Completion:
        return await self.engine.generate(request, self.version)

    def error(self, index: int, request: GenerateRequest, completion: Completion) -> float:
        return float(mismatch(self.models[index], request, completion).mean())


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[("qwen3_5_text", {}), ("qwen3_5_text", {"tie_word_embeddings": True}), ("qwen3_5", {}), ("lfm2", LFM2)],
    ids=["text", "tied", "multimodal", "lfm2"],
)
async def policies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Policies]:
    kind, changes = request.param
    folder = write_hybrid(tmp_path_factory.mktemp("policy"), kind, **changes)
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


async def test_logprobs_after_an_update_are_those_of_the_new_weights(policies: Policies) -> None:
    """Whether the version was staged while the engine sampled, or is loaded in the pause."""
    for index, staged in ((0, True), (1, True), (0, False), (1, False)):
        version = await policies.load(index, staged=staged)
        request = policies.request(PROMPT, max_new_tokens=40)
        completion = await policies.generate(request)
        assert [tuple(span) for span in completion.versions] == [(0, 40, version)]
        assert policies.error(index, request, completion) < NOISE
        assert policies.error(1 - index, request, completion) > OTHER_WEIGHTS


async def test_a_turn_that_spans_an_update_goes_on_under_the_new_weights(policies: Policies) -> None:
    """`keep` leaves its state; `recompute` computes it again, so that the rest is that of the new weights."""
    for engine in (policies.engine, policies.recomputing):
        old = await policies.load(0, engine)
        request = policies.request(PROMPT, max_new_tokens=300)
        running = asyncio.create_task(engine.generate(request, old))
        await engine.generate(policies.request((5, 6, 7), max_new_tokens=40), old)
        new = await policies.load(1, engine)
        completion = await running
        assert [(span.version, span.start) for span in completion.versions] == [
            (old, 0),
            (new, completion.versions[0].end),
        ]
        before = completion.versions[0].end
        assert mismatch(policies.models[0], request, completion)[:before].mean() < NOISE
        after = mismatch(policies.models[1], request, completion)[before:].mean()
        assert (after < NOISE) == (engine is policies.recomputing)


async def test_an_episode_continues_in_its_session_until_the_weights_change(policies: Policies) -> None:
    """The last sampled token of a turn has no state yet; stop tokens and lengths end turns alike."""
    version = await policies.load(0)
    sessions, prompt, kept = policies.engine.sessions, PROMPT[:20], 0
    continued = sessions.num_continued
    for turn, sampling in enumerate(({}, {"max_new_tokens": 1}, {"stop_token_ids": tuple(range(4, 60))}, {}, {})):
        if turn == 4:
            version, kept = await policies.load(1), 0
        limits = Sampling(**{"max_new_tokens": 30, **sampling})
        request = GenerateRequest(f"e{version}/{turn}", prompt, limits, episode=f"e{version}", continues=True)
        request = replace(request, episode="episode")
        completion = await policies.generate(request)
        assert completion.cached_tokens == kept
        assert policies.error(int(turn == 4), request, completion) < NOISE
        assert (completion.finish_reason is FinishReason.STOP) == ("stop_token_ids" in sampling)
        kept = len(prompt) + len(completion.token_ids) - 1
        prompt = (*prompt, *completion.token_ids, 3 + turn, 7, 5)
    assert sessions.num_continued == continued + 3


async def test_a_cached_prefix_gives_the_logprobs_of_a_computed_one(policies: Policies) -> None:
    await policies.load(0)
    prefix = tuple((7 * n) % 100 + 4 for n in range(600))
    for tail, cached in (((5,), False), ((5, 6, 7), True), ((8,) * 40, True)):
        request = policies.request(prefix + tail, max_new_tokens=40)
        completion = await policies.generate(request)
        assert (completion.cached_tokens > 0) is cached
        assert policies.error(0, request, completion) < NOISE
    await policies.load(1)
    request = policies.request((*prefix, 5, 6), max_new_tokens=40)
    completion = await policies.generate(request)
    assert completion.cached_tokens == 0
    assert policies.error(1, request, completion) < NOISE


async def test_a_prompt_of_one_token_is_sampled_from(policies: Policies) -> None:
    await policies.load(0)
    request = policies.request((9,), max_new_tokens=40)
    assert policies.error(0, request, await policies.generate(request)) < NOISE


async def test_sessions_and_running_turns_share_a_small_cache(policies: Policies) -> None:
    """A sequence takes blocks for its keys and values, and those of its states, from one memory."""
    await policies.load(0)
    engine = policies.engine.salted("small")
    blocks = 3 * (1 + policies.engine.sessions.groups.num_state_blocks)
    engine.sessions = Sessions(engine.llm, 256, policies.engine.sessions.groups)
    engine.sessions.capacity.max_tokens = blocks * engine.llm.vllm_config.cache_config.block_size
    assert policies.engine.sessions.groups.num_state_blocks > 0

    async def play(episode: int) -> None:
        prompt, errors = PROMPT[: 5 + episode], list[float]()
        for turn in range(3):
            request = GenerateRequest(
                f"s{episode}/{turn}", prompt, Sampling(max_new_tokens=8), episode=f"s{episode}", continues=True
            )
            completion = await engine.generate(request, policies.version)
            errors.append(policies.error(0, request, completion))
            assert engine.sessions.num_waiting <= 3
            prompt = (*prompt, *completion.token_ids, 7)
        assert fmean(errors) < NOISE  # of eight tokens it is above in one of 500

    await asyncio.gather(*(play(episode) for episode in range(8)))
    await engine.sessions.close_all()
    assert engine.sessions.capacity.requests == engine.sessions.capacity.tokens == 0


async def test_an_aborted_turn_continues_from_its_tokens(policies: Policies) -> None:
    """As on another engine, which has no state of it."""
    await policies.load(0)
    engine = VllmEngine(policies.engine.llm, CONFIG.model_copy(update={"keep_sessions": False}), "resumes")
    request = policies.request(PROMPT, max_new_tokens=400)
    running = asyncio.create_task(engine.generate(request, policies.version))
    await engine.generate(policies.request((5, 6, 7), max_new_tokens=20), policies.version)
    await engine.abort([request.request_id])
    part = await running
    assert part.finish_reason is FinishReason.ABORT
    assert 0 < len(part.token_ids) < 400
    rest = policies.request(PROMPT + part.token_ids, max_new_tokens=30)
    assert policies.error(0, request, part) < NOISE
    assert policies.error(0, rest, await engine.generate(rest, policies.version)) < NOISE


async def test_a_file_without_one_of_the_tensors_is_refused(policies: Policies, tmp_path: Path) -> None:
    """The engine then serves what it served; a replica leaves the routing all the same."""
    await policies.load(0)
    tensors = load_file(policies.files[1])
    for part in ("A_log", "in_proj_z", "conv.conv.weight", "norm.weight"):
        for name in [name for name in tensors if part in name and "visual" not in name][:1]:
            save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "file.safetensors")
            with pytest.raises(Exception, match=r"(in this version|not in the file)"):
                await policies.engine.stage(tmp_path / "file.safetensors")
    request = policies.request(PROMPT, max_new_tokens=40)
    assert policies.error(0, request, await policies.generate(request)) < NOISE
