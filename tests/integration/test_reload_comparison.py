"""After a reload no tensor of the file may differ unnoticed from what vLLM's model holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file

from trainer.config import ModelArgs, TinyPolicyConfig, TinyVisionConfig
from trainer.models.policy import load_policy
from trainer.policies.tiny import write_tiny_policy

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("vision", [None, TinyVisionConfig()], ids=["qwen2", "qwen2_vl"])
def test_no_tensor_of_a_version_can_differ_unnoticed(tmp_path: Path, vision: TinyVisionConfig | None) -> None:
    folder, version = tmp_path / "policy", tmp_path / "1.safetensors"
    write_tiny_policy(folder, TinyPolicyConfig(num_hidden_layers=2, vision=vision), ("a", "b", "c"))
    policy = load_policy(folder, ModelArgs(), seed=7)
    save_file({name: weight.detach().clone() for name, weight in policy.model.named_parameters()}, version)
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("reload_comparison.py")), str(folder), str(version)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["tensors"] > 20
    assert found["unnoticed"] == []
