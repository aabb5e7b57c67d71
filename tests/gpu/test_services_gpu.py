"""Scoring services and reward models on a GPU of their own: `pytest tests/gpu/test_services_gpu.py` on two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.services.reward.reward_models import write_reward_model

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
    pytest.mark.timeout(900),
]
ON_FIRST = (
    *("actor_train.device=cuda", "actor_infer.device=cuda", "actor_train.device_mapping=[0]"),
    *("actor_infer.device_mapping=[0]", "max_steps=3", "warm_start.steps=5", "eval_steps=0", "final_val_batch_size=8"),
)


def trained(run: Path, config: str, *settings: str) -> list[dict[str, float]]:
    """Return the values of each line of metrics.jsonl."""
    command = [sys.executable, "-m", "offbeat.deploy.cli.app", "train", config, f"output_dir={run}", *ON_FIRST]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"}
    subprocess.run([*command, *settings], env=environment, check=True, timeout=800)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] or 0 for line in lines) >= 3
    return [line["values"] for line in lines]


def test_a_reference_on_the_second_gpu_scores_as_in_the_learner(tmp_path: Path) -> None:
    """The first step's policy is the reference: its KL is that of rounding, on either GPU."""
    penalty = ("use_kl_loss=true", "kl_loss_coef=0.1")
    beside = trained(tmp_path / "beside", "quickstart", *penalty, "reference.device_mapping=[1]")
    within = trained(tmp_path / "within", "quickstart", *penalty)
    assert sum(line.get("reference/groups", 0.0) for line in beside) > 0
    assert not any("reference/groups" in line for line in within)
    for lines in (beside, within):
        first = next(line["actor/kl_loss"] for line in lines if "actor/kl_loss" in line)
        assert abs(first) < 1e-3


def test_a_reward_model_on_the_second_gpu_scores_answers(tmp_path: Path) -> None:
    write_reward_model(tmp_path / "model")
    data, held_out = tmp_path / "data.jsonl", tmp_path / "held_out.jsonl"
    for path, *options in ((data,), (held_out, "--held-out")):
        subprocess.run([sys.executable, "-m", "offbeat.envs.dataset.arithmetic", path, *options], check=True)
    model = f"model_args:{{model_name_or_path:{tmp_path / 'model'}}}"
    rewards = f"[{{name:preference,kind:reward_model,device:cuda,device_mapping:[1],{model}}}]"
    files = (f"data.dataset_name={data}", f"data.val_dataset_name={held_out}")
    lines = trained(tmp_path / "run", "rlvr", *files, f"rewards={rewards}")
    assert any(name.endswith("reward/preference") for line in lines for name in line)
