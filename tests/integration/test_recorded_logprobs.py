"""Runs kept whole: each recorded logprob is that of the weights that its version names, whichever engine sampled it."""

import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from offbeat.deploy.config.loader import compose_tree, validate_tree
from offbeat.deploy.config.run import RunConfig
from offbeat.services.messages.types import Segment
from offbeat.trainer.trackers.metrics_file import METRICS_FILE, read_records
from offbeat.trainer.training.batch_log import BatchLog
from tests.integration.mesh import Start, TrainProcess, finished, start
from tests.paths import QUICKSTART
from tests.waiting import wait_until_sync

__all__ = ["start"]
pytestmark = [pytest.mark.alone, pytest.mark.timeout(400)]

FLOAT_NOISE = 3e-5
WHOLE = ("save_steps=1", "max_ckpt_to_keep=100", "record_batches=100", "zero_variance=train")
SLOW = (
    "custom_envs.FrozenLake.env_type=tests.integration.slow_lake:SlowLake",
    "custom_envs.FrozenLake.execution=thread",
    "rollout.num_threads=64",
    "warm_start.steps=1",  # its demonstrations play the same env
)
"""Episodes that take longer than a step of the learner."""


@pytest.mark.nightly
def test_recorded_logprobs_are_those_of_their_versions_weights(start: Start) -> None:
    """Turns within one version; under `keep` a longer one continues on older keys and values, as its spans show."""
    overrides = (*WHOLE, "max_steps=5", "actor_infer.strategy_args.strategy_name=hf_infer")
    train = start(*overrides)
    finished(train, steps=5)
    compared = compare(train.output_dir, overrides, steps=5)
    assert compared.tokens > 1000
    assert compared.mixed_turns * 10 < compared.tokens
    assert len(compared.versions) >= 4, "batches lag by one version at most"


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_kills_with_open_sessions_lose_no_group_and_mix_no_weights(start: Start) -> None:
    """vLLM's replica, an env worker, the learner and the engine core die while episodes stay in the engine and weights
    change."""
    overrides = (*WHOLE, *SLOW, "max_steps=10")
    train = start(*overrides)
    victims = ("ray::ServeReplica:generation", "ray::EnvWorker", "offbeat.trainer.cli", "VLLM::EngineCore")
    for step, victim in zip((1, 3, 5, 7), victims, strict=True):
        train.wait_for_step(step)
        began = time.time()
        wait_until_sync(lambda at=began: any(values["sessions"] for values in sampled(train, at)), every_s=0.2)
        train.kill(victim)
    report, found = finished(train, steps=10)
    assert report["max_staleness_seen"] <= 1
    assert found.lineage.learners == 2
    assert sum(values["continued"] for values in sampled(train)) > 1000
    compared = compare(train.output_dir, overrides, steps=10)
    assert compared.tokens > 1000
    assert compared.mixed_turns * 10 < compared.tokens
    assert compared.trajectories_through_updates > 10
    assert len(compared.versions) >= 8


def sampled(train: TrainProcess, since: float = 0.0) -> list[dict[str, float]]:
    """Metrics that replicas reported."""
    records = read_records(train.output_dir / METRICS_FILE)  # of a run that is going on: the last line may be cut
    return [each["values"] for each in records if each["source"] == "generation" and each["time"] > since]


class Compared(NamedTuple):
    tokens: int
    versions: set[int]
    mixed_turns: int
    """Turns of several versions, of whose tokens only the first version's are compared."""
    trajectories_through_updates: int


def compare(run: Path, overrides: tuple[str, ...], steps: int) -> Compared:
    return compare_run(run, validate_tree(compose_tree(QUICKSTART, list(overrides))), steps)


def compare_run(run: Path, config: RunConfig, steps: int) -> Compared:
    """Compare each recorded logprob with that of its version's checkpoint."""

    @cache
    def model(version: int) -> Any:
        return AutoModelForCausalLM.from_pretrained(run / "checkpoints" / f"step-{version:06d}").eval()

    tokens, versions, mixed, through = 0, set[int](), 0, 0
    for step in range(1, steps + 1):
        batch = BatchLog(run).read(step, config).batch
        turns = [turn for group in batch.groups for each in group.trajectories for turn in versioned_turns(each)]
        for version in {turn.version for turn in turns}:
            own = [turn for turn in turns if turn.version == version]
            for turn, expected in zip(own, logprobs(model(version), [turn.segment for turn in own]), strict=True):
                recorded = torch.tensor(turn.segment.logprobs[turn.start : turn.end])
                assert (expected[turn.start : turn.end] - recorded).abs().max() < FLOAT_NOISE
                tokens += turn.end - turn.start
                mixed += turn.is_mixed
            versions.add(version)
        by_trajectory = [{t.version for t in versioned_turns(each)} for g in batch.groups for each in g.trajectories]
        through += sum(len(each) > 1 for each in by_trajectory)
    return Compared(tokens, versions, mixed, through)


class VersionedTurn(NamedTuple):
    """Tokens of a turn that were sampled under the version of its first one."""

    segment: Segment
    version: int
    start: int
    end: int
    is_mixed: bool


def versioned_turns(trajectory: Any) -> Iterator[VersionedTurn]:
    for turn in trajectory.turns:
        segment: Segment = trajectory.segments[turn.segment]
        versions = segment.token_versions()[turn.start : turn.end]
        end = turn.start + int((versions == versions[0]).sum())
        yield VersionedTurn(segment, int(versions[0]), turn.start, end, end < turn.end)


def logprobs(model: Any, segments: Sequence[Segment]) -> Iterator[torch.Tensor]:
    """Each token's under the model, 0 for the first."""
    ids = pad_sequence([torch.tensor(segment.tokens).long() for segment in segments], batch_first=True)
    with torch.no_grad():
        logits = model(ids).logits[:, :-1]
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return iter(torch.cat([torch.zeros(len(ids), 1), chosen], dim=1))
