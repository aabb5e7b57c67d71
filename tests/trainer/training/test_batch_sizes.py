"""ROLL's batch sizes: optimizer steps per pass, token budgets of passes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.roles import TeacherConfig, TeacherModelArgs
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_critic, load_policy
from offbeat.trainer.training.optimizer_step import BatchTrainer, StepModels
from tests.fakes import train_on
from tests.trainer.data.test_prefix_trees import ragged
from tests.trainer.plain_engine import PlainEngine


def config(training_args: dict[str, Any], **tree: Any) -> LearnerConfig:
    train = {"training_args": training_args, **tree.pop("actor_train", {})}
    return LearnerConfig.model_validate({"rollout_batch_size": 8, "sequence_length": 64, "actor_train": train, **tree})


@pytest.mark.parametrize(
    ("processes", "per_device", "accumulation", "steps"),
    [(1, 2, 4, 1), (1, 2, 2, 2), (1, 1, 1, 8), (2, 2, 2, 1), (4, 1, 1, 2)],
)
def test_optimizer_steps_and_token_budget_follow_from_rolls_keys(
    processes: int, per_device: int, accumulation: int, steps: int
):
    args = {"per_device_train_batch_size": per_device, "gradient_accumulation_steps": accumulation}
    resolved = config(args, actor_train={"num_processes": processes})
    training = resolved.actor_train.training_args
    assert (training.num_minibatches, training.max_tokens_per_microbatch) == (steps, per_device * 64)
    assert LearnerConfig.model_validate_json(resolved.model_dump_json()) == resolved


@pytest.mark.parametrize("split", ["tp_size", "ulysses_size"])
def test_processes_that_compute_the_same_micro_batches_count_once(split: str):
    args = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    strategy = {"strategy_name": "fsdp2_train", split: 2}
    resolved = config(args, actor_train={"num_processes": 4, "strategy_args": strategy})
    assert resolved.actor_train.training_args.num_minibatches == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 1}, "3 trajectories per optimizer step"),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_minibatches": 4}, "which imply 2"),
        ({"per_device_train_batch_size": 2, "max_tokens_per_microbatch": 100}, "which imply 128"),
        ({"gradient_accumulation_steps": 2}, "no effect without per_device_train_batch_size"),
    ],
)
def test_keys_that_disagree_are_refused(args: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        config(args)


def test_keys_that_agree_are_accepted():
    args = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_minibatches": 2}
    assert config(args | {"max_tokens_per_microbatch": 128}).actor_train.training_args.num_minibatches == 2


class CountingEngine(PlainEngine):
    """Records the micro-batches of each pass without gradient."""

    def infer(self, batch: Any, read: Any = None) -> list[torch.Tensor]:
        self.passes = [len(micro.tokens) for micro in batch]
        return super().infer(batch, read)


def passes(folder: Path, **tree: Any) -> dict[str, list[int]]:
    """Tokens of each role's passes in one step."""
    settings = config(
        {"max_tokens_per_microbatch": 1000},
        adv_estimator="gae",
        old_logprobs="recompute",
        zero_variance="train",
        use_kl_loss=True,
        kl_loss_coef=0.1,
        use_opd=True,
        **tree,
    )
    policy, reference, teacher = (CountingEngine(load_policy(folder, ModelArgs(), seed=1)) for _ in range(3))
    critic = CountingEngine(load_critic(folder, ModelArgs(), seed=1))
    models = StepModels(policy, critic, reference, [teacher])
    train_on(BatchTrainer(settings, models, Ranks(0, 0, 1, torch.device("cpu"))), ragged(), 0)
    engines = {"policy": policy, "critic": critic, "reference": reference, "teacher": teacher}
    return {role: engine.passes for role, engine in engines.items()}


def teacher(folder: Path, **keys: Any) -> dict[str, Any]:
    return {"teacher": {"one": TeacherConfig(model_args=TeacherModelArgs(model_name_or_path=str(folder)), **keys)}}


def test_infer_batch_size_bounds_the_passes_of_each_role(folder: Path):
    total = passes(folder, **teacher(folder))
    num_groups = 4  # frozen models score each group by itself
    assert {role: len(sizes) for role, sizes in total.items()} == {
        "policy": 1,
        "critic": 1,
        "reference": num_groups,
        "teacher": num_groups,
    }
    inherited = passes(folder, actor_train={"infer_batch_size": 1}, **teacher(folder))
    assert all(len(sizes) > 1 and max(sizes) <= 64 for sizes in inherited.values())
    own = passes(
        folder,
        critic={"infer_batch_size": 1},
        reference={"infer_batch_size": 2},
        **teacher(folder, infer_batch_size=1),
    )
    assert len(own["policy"]) == 1 < len(own["critic"])
    assert max(own["critic"] + own["teacher"]) <= 64 < max(own["reference"])
    assert len(own["reference"]) == num_groups < len(own["teacher"])
    assert all(sum(sizes) == sum(total["policy"]) for sizes in (*own.values(), *inherited.values()))
