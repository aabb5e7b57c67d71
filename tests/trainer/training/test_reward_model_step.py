"""Steps of `pipeline: reward_model` against float64, TRL, and what a reward of that kind says of the saved folder."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from offbeat.benchmarks.harness.pretrained import write_llama
from offbeat.envs.frozen_lake.rows import pairs, write_rows
from offbeat.services.errors import EpisodeError
from offbeat.services.messages.types import Group
from offbeat.services.reward.kinds.model_config import RewardModelArgs, RewardModelConfig
from offbeat.services.reward.kinds.reward_model import ConversationScorer
from offbeat.services.reward.sample import RewardSample
from offbeat.services.rollout.data.config import DataConfig
from offbeat.services.rollout.data.source import DataSource
from offbeat.trainer.algorithms.bradley_terry import bradley_terry
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.export import copy_model_files, export_weights
from offbeat.trainer.models.loading import load_reward_model
from offbeat.trainer.models.reward_model import PackedRewardModel
from offbeat.trainer.training.data_step import DataTrainer
from offbeat.trainer.training.optimizer_step import StepModels
from tests.qwen2 import write_qwen2
from tests.trainer.plain_engine import PlainEngine

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
MARGINS = [0.0, 0.5, -0.25, 2.0, 0.0, 1.0]
COEF = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward-model")
    rows = [dict(row, margin=margin) for row, margin in zip(pairs(6), MARGINS, strict=True)]
    write_rows(path / "rows.jsonl", iter(rows))
    write_llama(path / "llama")
    write_qwen2(path / "qwen2", [json.dumps(row) for row in rows])
    return path


def read_groups(folder: Path, model: str, rows: str = "rows.jsonl") -> tuple[Group, ...]:
    data = DataConfig(dataset_name=folder / rows, shuffle=False)
    source = DataSource(data, "reward_model", folder / model, seed=0, max_tokens=2048)
    members = [tuple(source.trajectory(n, index, 0) for index in range(2)) for n in range(source.num_rows)]
    return tuple(Group(f"{n}-0", str(n), n, "reward_model", 0, 0, each) for n, each in enumerate(members))


def make_trainer(folder: Path, model: str, budget: int = 600, **settings: Any) -> tuple[DataTrainer, PlainEngine]:
    args = {"learning_rate": 1e-3, "max_tokens_per_microbatch": budget}
    tree = {"pipeline": "reward_model", "center_rewards_coefficient": COEF, "sequence_length": 2048, **settings}
    tree["actor_train"] = {"training_args": args, "model_args": settings.pop("model_args", {})}
    tree.pop("model_args", None)
    engine = PlainEngine(load_reward_model(folder / model, ModelArgs(**tree["actor_train"]["model_args"]), seed=0))
    return DataTrainer(LearnerConfig.model_validate(tree), StepModels(engine), ALONE), engine


def logits_of(folder: Path, groups: tuple[Group, ...]) -> list[float]:
    """What transformers' own classifier says of each trajectory, one at a time and without padding, in float64."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        return [
            float(model(input_ids=torch.from_numpy(t.segments[0].tokens).long()[None]).logits[0, 0])
            for g in groups
            for t in g.trajectories
        ]


def save(module: PackedRewardModel, source: Path, folder: Path) -> Path:
    """What a checkpoint holds of the model."""
    folder.mkdir()
    copy_model_files(source, folder)
    module.write_config(folder)
    export_weights(folder, ((name.removeprefix("model."), each) for name, each in module.named_parameters()))
    return folder


def by_hand(rewards: list[float]) -> float:
    losses = [
        math.log1p(math.exp(-(chosen - rejected - margin))) + COEF * (chosen + rejected) ** 2
        for chosen, rejected, margin in zip(rewards[::2], rewards[1::2], MARGINS, strict=True)
    ]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_a_saved_model_is_a_classifier_whose_loss_is_that_of_training(model: str, folder: Path, tmp_path: Path) -> None:
    """The reward `reward_model` scores the same texts by it as the trainer does."""
    trainer, engine = make_trainer(folder, model)
    groups = read_groups(folder, model)
    for step in range(20):
        trainer.train(StepBatch(step, groups, groups))
    reported = {name: partial.value for name, partial in trainer.evaluate(groups).items()}
    module = engine.module
    assert isinstance(module, PackedRewardModel)
    saved = save(module, folder / model, tmp_path / "saved")
    rewards = logits_of(saved, groups)
    assert reported["loss"] == pytest.approx(by_hand(rewards), rel=1e-4)
    assert reported["rewards/chosen"] == pytest.approx(sum(rewards[::2]) / 6, abs=1e-4)
    assert (
        reported["rewards/accuracies"] == sum(a > b for a, b in zip(rewards[::2], rewards[1::2], strict=True)) / 6 == 1
    )
    scorer = ConversationScorer(
        RewardModelConfig(name="r", kind="reward_model", model_args=RewardModelArgs(model_name_or_path=saved))
    )
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    samples = [RewardSample(row["prompt"], row[key], 1, None, "", {}) for row in rows for key in ("chosen", "rejected")]
    assert scorer.score([scorer.tokenize(each) for each in samples]) == pytest.approx(rewards, abs=1e-4)


def test_gradients_do_not_depend_on_micro_batches_nor_on_a_shared_prefix(folder: Path) -> None:
    weights: list[torch.Tensor] = []
    for settings in ({"budget": 10_000}, {"budget": 100}, {"budget": 600, "model_args": {"shared_prefix": True}}):
        trainer, engine = make_trainer(folder, "llama", **settings)
        groups = read_groups(folder, "llama")
        trainer.train(StepBatch(0, groups, groups))
        weights.append(torch.cat([tensor.flatten() for _, tensor in engine.tensors()]).clone())
    assert not torch.equal(weights[0], torch.cat([t.flatten() for _, t in make_trainer(folder, "llama")[1].tensors()]))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(weights[2], weights[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("coef", [0.0, COEF])
@pytest.mark.filterwarnings("ignore:TRL currently supports vLLM", "ignore:`torch.jit")
def test_loss_and_gradients_equal_trl(coef: float) -> None:
    trainer = pytest.importorskip("trl.trainer.reward_trainer")
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = (torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    margin = torch.tensor(MARGINS, dtype=torch.float64)
    alone = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    trl = SimpleNamespace(
        args=SimpleNamespace(center_rewards_coefficient=coef or None),
        accelerator=alone,
        _total_train_tokens=0,
        _tp_size=1,
        _metrics={"train": {name: [] for name in ("min_reward", "mean_reward", "max_reward", "accuracy", "margin")}},
        model=SimpleNamespace(training=True),
    )
    inputs = {"margin": margin, "attention_mask": torch.ones(12)}
    output = SimpleNamespace(logits=torch.cat([chosen, rejected])[:, None])
    expected = trainer.RewardTrainer.compute_loss(trl, Answering(output), inputs)
    ours = bradley_terry(chosen, rejected, margin, coef).mean()
    torch.testing.assert_close(ours, expected)
    for one, two in zip(
        torch.autograd.grad(ours, [chosen, rejected], retain_graph=True),
        torch.autograd.grad(expected, [chosen, rejected]),
        strict=True,
    ):
        torch.testing.assert_close(one, two)


class Answering:
    """A model with one answer."""

    training = True

    def __init__(self, output: object) -> None:
        self._output = output

    def __call__(self, **_: object) -> object:
        return self._output


def test_a_margin_that_is_no_number_is_a_bad_row(folder: Path) -> None:
    write_rows(folder / "bad.jsonl", iter([dict(next(pairs(1)), margin="wide")]))
    with pytest.raises(EpisodeError, match=r"bad.jsonl:1: margin: expected a finite number, got 'wide'"):
        read_groups(folder, "llama", "bad.jsonl")
