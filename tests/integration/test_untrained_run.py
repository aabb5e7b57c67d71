"""A run in which nothing can be learned does not end as a success."""

import json
import subprocess
from pathlib import Path

import pytest

from offbeat.deploy.cli.train import UNTRAINED
from tests.integration.steering import OFFBEAT

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]

ENV = """
import gymnasium


class Silent(gymnasium.Env):
    system_prompt = "say it"
    words = ("say", "it")

    def reset(self, *, seed=None, options=None):
        return "it", {}

    def step(self, action):
        return "it", 0.5, True, False, {}
"""
RUN = """
exp_name: silent
output_dir: runs/silent
custom_envs:
  Silent: {env_type: "silent:Silent", max_steps: 1, max_tokens_per_step: 2}
train_env_manager: {num_env_groups: 4, group_size: 2}
rollout_batch_size: 4
max_steps: 8
eval_steps: 0
final_val_batch_size: 4
sequence_length: 64
actor_infer: {strategy_args: {strategy_name: hf_infer}}
"""


def test_a_run_whose_rewards_are_all_equal_ends_with_a_diagnosis(tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text(ENV)
    (tmp_path / "silent.yaml").write_text(RUN)
    result = subprocess.run(
        [OFFBEAT, "train", "silent.yaml"], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == UNTRAINED, result.stdout + result.stderr
    said = "every reward of the last 8 steps was 0.5"
    assert f"The run finished, but no token was trained: {said}" in result.stdout
    report = json.loads((tmp_path / "runs" / "silent" / "report.json").read_text())
    assert [finding["seen"] for finding in report["diagnosis"] if finding["is_warning"]] == [said]
    assert report["tokens_trained"] == 0
