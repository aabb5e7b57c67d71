"""`bootstrap_truncated`: the value after a cut episode's last token, from either critic, however the batch is cut."""

from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.services.messages.types import Group, StopReason
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_critic, load_policy
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.training.optimizer_step import BatchTrainer, StepModels
from tests.copying import replace
from tests.fakes import make_group, train_on
from tests.trainer.data.test_prefix_trees import ragged
from tests.trainer.plain_engine import PlainEngine

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
GAMMA = 0.9


def some_cut(groups: list[Group]) -> list[Group]:
    """Limits cut two of four episodes; an error ends one."""
    return [
        replace(g, trajectories=tuple(replace(t, stop_reason=stop_reason(t.index)) for t in g.trajectories))
        for g in groups
    ]


LIMITS = (StopReason.MAX_STEPS, StopReason.TRUNCATED)


def stop_reason(index: int) -> StopReason:
    return (StopReason.TERMINATED, LIMITS[0], StopReason.ERROR, LIMITS[1])[index % 4]


def config(backbone: str, *, shared: bool, budget: int, **settings: Any) -> LearnerConfig:
    train = {"model_args": {"shared_prefix": shared}, "training_args": {"max_tokens_per_microbatch": budget}}
    tree = {"adv_estimator": "gae", "gamma": GAMMA, "critic": {"backbone": backbone}, "actor_train": train}
    return LearnerConfig.model_validate(tree | {"bootstrap_truncated": True} | settings)


@pytest.mark.parametrize("backbone", ["own", "policy"])
@pytest.mark.parametrize(("shared", "budget"), [(False, 1000), (False, 20), (True, 1000)])
@pytest.mark.parametrize("settings", [{}, {"old_logprobs": "recompute"}], ids=["behavior", "recompute"])
def test_the_last_return_of_a_cut_episode_holds_the_value_after_it(
    folder: Path, backbone: str, shared: bool, budget: int, settings: dict[str, Any]
) -> None:
    run = config(backbone, shared=shared, budget=budget, **settings)
    policy = load_policy(folder, run.actor_train.model_args, seed=1, value_head=run.has_value_head)
    critic = load_critic(folder, run.actor_train.model_args, seed=2) if run.has_own_critic else None
    valued: Any = critic or policy
    torch.nn.init.normal_(valued.value_head.weight, generator=torch.Generator().manual_seed(3))
    batches = BatchTrainer(run, StepModels(PlainEngine(policy), PlainEngine(critic) if critic else None), ALONE)
    groups = some_cut(ragged() if shared else [make_group(n, rewards=(0.0, 1.0, 0.5, 1.0)) for n in range(2)])
    preview = batches.preview(StepBatch.build(0, groups, run))
    assert preview is not None
    assert preview.targets.returns is not None
    last = preview.targets.returns[preview.batch.last]
    members = [trajectory for group in groups for trajectory in group.trajectories]
    for got, trajectory in zip(last.tolist(), members, strict=True):
        tokens = torch.from_numpy(trajectory.segments[-1].tokens[: trajectory.turns[-1].end]).long()
        with torch.no_grad():  # the value before one more token is that after the last
            x = PackedInput.of(
                torch.cat([tokens, tokens[:1]]), torch.tensor([0, len(tokens) + 1]), torch.tensor([len(tokens)])
            )
            after = valued(x).values if critic is None else valued(x)
        is_cut = trajectory.stop_reason in LIMITS
        assert got == pytest.approx(trajectory.turns[-1].reward + is_cut * GAMMA * float(after), abs=1e-4)


@pytest.mark.parametrize("backbone", ["own", "policy"])
def test_a_step_trains_on_bootstrapped_targets(folder: Path, backbone: str) -> None:
    run = config(backbone, shared=False, budget=20)
    policy = load_policy(folder, ModelArgs(), seed=1, value_head=run.has_value_head)
    critic = PlainEngine(load_critic(folder, ModelArgs(), seed=2)) if run.has_own_critic else None
    batches = BatchTrainer(run, StepModels(PlainEngine(policy), critic), ALONE)
    gauges = [train_on(batches, some_cut([make_group(0, rewards=(0.0, 1.0))]), step) for step in range(3)]
    assert gauges[0]["critic/returns/mean"].value != pytest.approx(gauges[2]["critic/returns/mean"].value, abs=1e-6)
