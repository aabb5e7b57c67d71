"""What SGLang's real server must do, on any device."""

import asyncio
from dataclasses import replace
from pathlib import Path

from offbeat.services.generation.sglang.engine import SglangEngine
from offbeat.services.messages.types import GenerateRequest, Sampling, VersionSpan
from tests.integration.policy_weights import mismatch, random_policy, save_weights


async def check_logprobs_across_an_update(
    engine: SglangEngine, folder: Path, tolerance: float, *, recomputes: bool = False
) -> None:
    """folder: of the model. Tokens have the learner's logprobs, also from the cache, under the next version and `top_k`."""
    models = [random_policy(folder, seed) for seed in range(2)]
    files = [save_weights(model, folder / f"{i}.safetensors") for i, model in enumerate(models)]
    await engine.load(files[0], 0)

    def ask(name: str, most: int) -> GenerateRequest:
        return GenerateRequest(name, tuple(range(4, 28)), Sampling(max_new_tokens=most))

    for request in (ask("first", 32), ask("cached", 32)):
        answer = await engine.generate(request, 0)
        assert answer.versions == (VersionSpan(0, 32, 0),)
        assert float(mismatch(models[0], request, answer).max()) < tolerance
    assert answer.cached_tokens > 0
    long = ask("long", 480)
    running = asyncio.create_task(engine.generate(long, 0))
    await engine.generate(ask("beside", 8), 0)  # the long one has begun by then
    await engine.load(files[1], 1)
    answer = await running
    before, after = answer.versions
    assert (before.version, after.version) == (0, 1)
    if recomputes:
        assert float(mismatch(models[1], long, answer)[after.start :].max()) < tolerance
    request = ask("after", 32)
    answer = await engine.generate(request, 1)
    assert answer.cached_tokens == 0, "keys and values of other weights"
    assert float(mismatch(models[1], request, answer).max()) < tolerance
    sampling = Sampling(temperature=0.8, top_k=5, max_new_tokens=64)
    request = replace(request, request_id="cut", sampling=sampling)
    answer = await engine.generate(request, 1)
    assert float(mismatch(models[1], request, answer, top_k=5).max()) < tolerance
