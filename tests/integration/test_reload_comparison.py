"""After a reload no tensor of the file may differ unnoticed from what vLLM's model holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig, TinyVisionConfig
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.paths import ROOT


def model_with_a_version(folder: Path, vision: TinyVisionConfig | None) -> Path:
    write_tiny_policy(folder, TinyPolicyConfig(num_hidden_layers=2, vision=vision), ("a", "b", "c"))
    policy = load_policy(folder, ModelArgs(), seed=7)
    weights = {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}
    save_file(weights, folder / "version.safetensors")
    return folder


@pytest.mark.timeout(900)
def test_no_tensor_of_a_version_can_differ_unnoticed_images_or_not(tmp_path: Path) -> None:
    folders = [
        model_with_a_version(tmp_path / "words", None),
        model_with_a_version(tmp_path / "seeing", TinyVisionConfig()),
    ]
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("reload_comparison.py")), *map(str, folders)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    words, seeing = (json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"tensors"'))
    assert words["tensors"] > 20
    assert seeing["tensors"] > words["tensors"]
    assert words["unnoticed"] == seeing["unnoticed"] == []
