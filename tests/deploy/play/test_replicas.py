"""Several engines of one policy."""

from pathlib import Path

import psutil
import pytest

from offbeat.deploy.play.engine import EngineSampler
from offbeat.deploy.play.replicas import MODULE, ReplicaSampler, open_replicas, replica_environment
from offbeat.deploy.play.target import build_target, load_config
from offbeat.services.devices import VISIBLE
from offbeat.services.errors import EpisodeError, RetryableError
from offbeat.services.generation.config import EngineStrategy, GenerationConfig
from offbeat.services.messages.types import Completion, GenerateRequest, PromptImage, Sampling


class FakeEngine:
    def __init__(self) -> None:
        self.is_dead = False

    async def generate(self, request: GenerateRequest, version: int) -> Completion:
        del version
        if self.is_dead:
            raise RetryableError("it died")
        return Completion(request.request_id)


def sampler_of(engine: FakeEngine) -> EngineSampler:
    return EngineSampler(engine, Sampling(), 0)


def test_an_episode_gets_the_engine_with_the_fewest() -> None:
    first, second = sampler_of(FakeEngine()), sampler_of(FakeEngine())
    replicas = ReplicaSampler([first, second])
    with replicas.episode() as one, replicas.episode() as other:
        assert (one, other) == (first, second)
        with replicas.episode() as third:
            assert third is first
    with replicas.episode() as one, replicas.episode():
        assert one is first


async def test_a_dead_engine_gets_no_more_episodes() -> None:
    """It would have the fewest."""
    engines = [FakeEngine(), FakeEngine()]
    first, second = map(sampler_of, engines)
    replicas = ReplicaSampler([first, second])
    engines[0].is_dead = True
    with pytest.raises(EpisodeError, match="generation_unavailable: it died"):
        await first((3,), 2)
    with replicas.episode() as one, replicas.episode() as other:
        assert one is other is second
    engines[1].is_dead = True
    with pytest.raises(EpisodeError):
        await second((3,), 2)
    with replicas.episode() as one:
        assert one is first, "all have died: an episode says so"


def test_each_engine_has_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,5,6,7")
    strategy = {"strategy_config": {"tensor_parallel_size": 2}}
    infer = GenerationConfig.model_validate({"strategy_args": strategy, "device": "cuda"})
    assert [replica_environment(infer, index, "")[VISIBLE] for index in (0, 1)] == ["4,5", "6,7"]
    assert VISIBLE not in replica_environment(infer.model_copy(update={"device": "cpu"}), 0, "")


async def test_an_engine_that_dies_is_named_and_the_others_go_on(folder: Path) -> None:
    config = load_config(folder / "run.yaml")
    strategy = EngineStrategy(strategy_name="hf_infer")
    infer = config.actor_infer.model_copy(update={"strategy_args": strategy, "num_replicas": 2})
    async with open_replicas(infer, folder / "policy", build_target(config, "Boxes"), (0,), seed=1) as replicas:
        processes = [each for each in psutil.Process().children() if MODULE in each.cmdline()]
        assert len(processes) == 2
        with replicas.episode() as first, replicas.episode() as second:
            assert first is not second
            assert len((await second((3, 4), 2)).token_ids) <= 2
            with pytest.raises(EpisodeError, match="generation_refused: a token id is outside the vocabulary"):
                await second((3, 10**6), 2)
            with pytest.raises(EpisodeError, match=r"generation_refused: .* an image is not a PNG"):
                await second((3, 4), 2, (PromptImage(0, 1, b""),))
            processes[1].kill()
            processes[1].wait()
            with pytest.raises(EpisodeError, match="generation_unavailable: engine 2 of 2: the engine's process ended"):
                await second((3, 4), 2)
            assert len((await first((3, 4), 2)).token_ids) <= 2
    assert not any(each.is_running() for each in processes)
