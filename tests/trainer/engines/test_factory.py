from pathlib import Path

import pytest
import torch

from offbeat.trainer.config.actor_train import ActorTrainConfig, ModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig, TinyVisionConfig
from offbeat.trainer.engines.factory import make_engine
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.tiny import write_tiny_policy


def test_a_policy_with_image_input_has_one_process(tmp_path: Path) -> None:
    """A rank without images in its micro-batches would have no gradient of the vision tower."""
    write_tiny_policy(tmp_path, TinyPolicyConfig(num_hidden_layers=1, vision=TinyVisionConfig()), ["a"])
    policy = load_policy(tmp_path, ModelArgs(), seed=1)
    with pytest.raises(ValueError, match="trains in one process, but has 2: take one"):
        make_engine(policy, ActorTrainConfig(), Ranks(0, 0, 2, torch.device("cpu")))
