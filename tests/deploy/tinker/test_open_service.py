import asyncio
from pathlib import Path

import pytest

from offbeat.deploy.tinker.open_service import ServiceSettings, open_service
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.hf.engine import HfEngine
from offbeat.services.tinker.config import TinkerConfig
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.waiting import PATIENCE_S, wait_until


async def test_a_start_that_waits_for_the_learner_can_be_cancelled(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights never come, as with a learner that keeps dying."""
    start, started = HfEngine.start, asyncio.Event()

    async def start_and_tell(config: GenerationConfig, model: Path, *, sequence_length: int, seed: int) -> HfEngine:
        engine = await start(config, model, sequence_length=sequence_length, seed=seed)
        started.set()
        return engine

    monkeypatch.setattr(HfEngine, "start", start_and_tell)
    write_tiny_policy(tmp_path / "policy", TinyPolicyConfig(num_hidden_layers=1), ["a", "b"])
    settings = ServiceSettings(
        name="test",
        redis_url=redis_url,
        model=str(tmp_path / "policy"),
        model_name="tiny",
        weights=str(tmp_path / "base.safetensors"),
        generation=GenerationConfig(kv_cache_gib=0.01).model_dump_json(),
        tinker=TinkerConfig().model_dump_json(),
        context=32,
        seed=0,
    )

    async def open_and_close() -> None:
        async with open_service(settings):
            pytest.fail("it opened without weights")

    before = asyncio.all_tasks()
    opening = asyncio.create_task(open_and_close())
    await wait_until(lambda: started.is_set() or opening.done())
    assert not opening.done()
    opening.cancel()
    done, _ = await asyncio.wait({opening}, timeout=PATIENCE_S)
    assert done
    assert opening.cancelled()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before, "the engine's loop continues"
