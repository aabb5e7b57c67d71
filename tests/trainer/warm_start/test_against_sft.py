"""The warm start and `pipeline: sft` on the same conversations end with the same weights."""

from pathlib import Path

import numpy as np
import pytest
import torch

from offbeat.envs.frozen_lake.rows import write_rows
from offbeat.services.chat.append_only import load_chat_format
from offbeat.services.messages.types import Group
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.data.config import DataConfig
from offbeat.services.rollout.data.source import DataSource
from offbeat.trainer.config.actor_train import ModelArgs, TrainingArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.config.warm_start import WarmStartConfig
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.tiny import write_tiny_policy
from offbeat.trainer.training.data_step import DataTrainer
from offbeat.trainer.training.optimizer_step import StepModels
from offbeat.trainer.warm_start.demonstrations import load_demos, make_conversation_sampler
from offbeat.trainer.warm_start.factory import make_demonstrator
from offbeat.trainer.warm_start.train import DEMO_SEED_STREAM, warm_start
from tests.trainer.plain_engine import PlainEngine

ENV = CustomEnv(env_type="frozen_lake", max_steps=12, env_config={"size": 4, "p": 0.7})
"""The quickstart's."""
WARM = WarmStartConfig(
    demos="offbeat.envs.frozen_lake.demos:careful_wandering",
    tag="lake",
    steps=5,
    episodes_per_step=4,
    learning_rate=3e-3,
    warmup_steps=0,
    final_lr_ratio=1.0,
)
SEED = 3


@pytest.mark.parametrize(("train_on", "is_equal"), [("completion", True), ("all", False)])
def test_equal_conversations_give_equal_weights(train_on: str, is_equal: bool, tmp_path: Path) -> None:
    sample, rng = make_conversation_sampler(load_demos(WARM), ENV), np.random.default_rng([SEED, DEMO_SEED_STREAM])
    rows = [{"messages": messages} for _ in range(WARM.steps * WARM.episodes_per_step) for messages in sample(rng)]
    write_rows(tmp_path / "rows.jsonl", iter(rows))
    words = dict.fromkeys(word for row in rows for message in row["messages"] for word in message["content"].split())
    write_tiny_policy(tmp_path / "model", TinyPolicyConfig(num_hidden_layers=1), list(words))

    demonstrate = make_demonstrator(WARM, ENV, load_chat_format(tmp_path / "model"), max_tokens=512)
    warm = PlainEngine(load_policy(tmp_path / "model", ModelArgs(), seed=1))
    last_loss = warm_start(warm, WARM, demonstrate, seed=SEED, limits=TrainingArgs(), progress=lambda *_: None)

    tuned = PlainEngine(load_policy(tmp_path / "model", ModelArgs(), seed=1))
    loss = fine_tune(tuned, tmp_path, train_on)
    before = load_policy(tmp_path / "model", ModelArgs(), seed=1).state_dict()
    same = [
        torch.allclose(one, two, rtol=0, atol=1e-5)
        for (_, one), (_, two) in zip(warm.tensors(), tuned.tensors(), strict=True)
    ]
    moved = [not torch.allclose(tensor, before[f"model.{name}"], atol=1e-3) for name, tensor in warm.tensors()]
    assert any(moved)
    assert all(same) == is_equal
    assert (loss == pytest.approx(last_loss, rel=1e-5)) == is_equal


def fine_tune(engine: PlainEngine, folder: Path, train_on: str) -> float:
    """Train all rows; the last step's loss."""
    data = DataConfig.model_validate({"dataset_name": folder / "rows.jsonl", "shuffle": False, "train_on": train_on})
    source = DataSource(data, "sft", folder / "model", seed=0, max_tokens=512)
    args = {"learning_rate": WARM.learning_rate, "weight_decay": WARM.weight_decay, "lr_scheduler_type": "constant"}
    tree = {"pipeline": "sft", "data": data, "max_steps": WARM.steps, "actor_train": {"training_args": args}}
    trainer = DataTrainer(LearnerConfig.model_validate(tree), StepModels(engine), Ranks(0, 0, 1, torch.device("cpu")))
    loss = 0.0
    for step in range(WARM.steps):
        numbers = range(step * WARM.episodes_per_step, (step + 1) * WARM.episodes_per_step)
        groups = tuple(Group(f"{n}-0", str(n), n, "sft", 0, 0, (source.trajectory(n, 0, 0),)) for n in numbers)
        loss = trainer.train(StepBatch(step, groups, groups))["loss"].value
    return loss
