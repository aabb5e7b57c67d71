"""Answers of an engine, in an episode."""

import asyncio
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.play import engine as play_engine
from offbeat.deploy.play.engine import choose_engine, open_sampler
from offbeat.deploy.play.target import build_target, load_config
from offbeat.services.errors import EpisodeError
from offbeat.services.generation.config import EngineStrategy, GenerationConfig
from offbeat.services.generation.engine import PolicyEngine
from offbeat.services.messages.types import PromptImage


def config_of(name: str, **changes: Any) -> GenerationConfig:
    tree = {"strategy_args": {"strategy_name": name, **changes.pop("strategy_args", {})}, **changes}
    return GenerationConfig.model_validate(tree)


def test_an_engine_that_is_not_the_runs_takes_no_arguments_of_the_runs_own() -> None:
    own = {"strategy_config": {"max_num_seqs": 8, "mem_fraction_static": 0.5}}
    config = config_of("sglang", strategy_args=own)
    assert choose_engine(config, "config").strategy_args == choose_engine(config, "sglang").strategy_args
    chosen = choose_engine(config, "vllm")
    assert (chosen.strategy_args.strategy_name, chosen.engine.max_num_seqs) == ("vllm", 8)
    assert not chosen.engine.model_extra


@pytest.mark.parametrize(
    ("gpus", "installed", "changes", "device"),
    [
        (2, True, {}, "cuda"),
        (1, True, {}, "cpu"),
        (2, False, {}, "cpu"),
        (2, True, {"device": "cpu"}, "cpu"),
    ],
)
def test_an_engine_is_on_gpus_if_there_are_enough_for_one(
    monkeypatch: pytest.MonkeyPatch, gpus: int, installed: bool, changes: dict[str, Any], device: str
) -> None:
    """However many engines the run has, and whatever its learner needs."""
    monkeypatch.setattr(play_engine, "count_gpus", lambda: gpus)
    monkeypatch.setattr(play_engine, "is_installed", {"vllm": installed}.__getitem__)
    config = config_of(
        "vllm", strategy_args={"strategy_config": {"tensor_parallel_size": 2}}, num_replicas=4, **changes
    )
    assert choose_engine(config, "config").device == device
    assert choose_engine(config, "hf_infer").device == "cpu"


@pytest.mark.parametrize(
    ("gpus", "wanted", "number"), [(8, None, 3), (4, None, 2), (1, None, 1), (8, 4, 4), (0, 5, 5), (0, None, 1)]
)
def test_the_number_of_engines_is_as_asked_or_the_runs(
    monkeypatch: pytest.MonkeyPatch, gpus: int, wanted: int | None, number: int
) -> None:
    """The run's as far as the machine's GPUs suffice; one on CPUs."""
    monkeypatch.setattr(play_engine, "count_gpus", lambda: gpus)
    monkeypatch.setattr(play_engine, "is_installed", lambda _: True)
    arguments = {"strategy_config": {"tensor_parallel_size": 2}}
    config = config_of("vllm", strategy_args=arguments, num_replicas=3)
    assert choose_engine(config, "config", wanted).num_replicas == number


def test_more_engines_than_gpus_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play_engine, "count_gpus", lambda: 4)
    monkeypatch.setattr(play_engine, "is_installed", lambda _: True)
    config = config_of("vllm", strategy_args={"strategy_config": {"tensor_parallel_size": 2}})
    says = r"--replicas: 3 engines of 2 GPUs each \(tensor_parallel_size x .*more than this machine's 4 hold: take at most 2"
    with pytest.raises(ConfigError, match=says):
        choose_engine(config, "vllm", 3)
    assert choose_engine(config, "hf_infer", 3).num_replicas == 3, "it is on CPUs"
    large = config_of("vllm", strategy_args={"strategy_config": {"tensor_parallel_size": 8}}, device="cuda")
    with pytest.raises(ConfigError, match="4 hold: take fewer GPUs for each, or an engine on the CPU"):
        choose_engine(large, "vllm", 2)


async def test_a_refused_prompt_and_a_dead_engine_cost_the_episode(folder: Path) -> None:
    config = load_config(folder / "run.yaml")
    infer = config.actor_infer.model_copy(update={"strategy_args": EngineStrategy(strategy_name="hf_infer")})
    target = build_target(config, "Boxes")
    async with open_sampler(infer, folder / "policy", target, (0,), seed=1) as sample:
        assert len((await sample((3, 4), 2)).token_ids) <= 2
        with pytest.raises(EpisodeError, match="generation_refused: the prompt holds images"):
            await sample((3, 4), 2, (PromptImage(0, 1, b""),))
        with pytest.raises(EpisodeError, match="generation_refused: a token id is outside the vocabulary"):
            await sample((3, 10**6), 2)
        cast(PolicyEngine, sample._engine).close()
        with pytest.raises(EpisodeError, match="generation_unavailable: the engine failed"):
            await sample((3, 4), 2)
        assert sample.has_failed


def test_an_interrupt_of_a_start_in_a_thread_is_no_success(folder: Path) -> None:
    """asyncio raises it out of its loop, past the coroutine that waits."""
    config = load_config(folder / "run.yaml")
    infer = config.actor_infer.model_copy(update={"strategy_args": EngineStrategy(strategy_name="hf_infer")})

    async def interrupt() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        async with open_sampler(infer, folder / "policy", build_target(config, "Boxes"), (0,), seed=1):
            pytest.fail("it started")

    with pytest.raises(SystemExit) as ended:
        asyncio.run(interrupt())
    assert ended.value.code == 130
