from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat.envs.sokoban import WORDS
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import write_tiny_policy

RUN = """
exp_name: boxes
output_dir: {folder}/run
custom_envs:
  Boxes:
    env_type: sokoban
    max_steps: 3
    max_tokens_per_step: 3
    execution: inline
    env_config: {{dim_room: [5, 5], search_depth: 4}}
train_env_manager: {{num_env_groups: 8, group_size: 4}}
rollout_batch_size: 8
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`policy`: an untrained tiny policy that knows Sokoban's words; `run.yaml`: a run on Sokoban."""
    folder = tmp_path_factory.mktemp("play")
    write_tiny_policy(folder / "policy", TinyPolicyConfig(num_hidden_layers=2), WORDS)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "policy")).save_pretrained(folder / "policy")
    (folder / "run.yaml").write_text(RUN.format(folder=folder))
    return folder
