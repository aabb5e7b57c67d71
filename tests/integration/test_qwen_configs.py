"""Qwen2.5's configurations run as they stand: `offbeat train` with a small random model of that architecture.

The engine of one is vLLM; the others have the one that starts sooner."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.mesh import HF_INFER
from tests.paths import CONFIGS, ROOT
from tests.qwen2 import write_qwen2
from tests.webshop_files import write_shop

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

FOLDER = CONFIGS / "qwen2.5-0.5b"
SMALL = (
    *("max_steps=2", "rollout_batch_size=8", "train_env_manager.num_env_groups=2", "train_env_manager.group_size=4"),
    *("eval_steps=0", "final_val_batch_size=4", "save_steps=2", "actor_infer.kv_cache_gib=0.25"),
    *("zero_variance=train", "entropy_loss_coef=0.01"),  # random weights get no reward that distinguishes answers
    *("actor_train.training_args.learning_rate=1e-3", "actor_train.training_args.warmup_steps=0"),
)


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        pytest.param("frozen_lake", (), id="frozen_lake"),
        pytest.param("sokoban", (HF_INFER,), id="sokoban", marks=pytest.mark.nightly),
        pytest.param("webshop", (HF_INFER,), id="webshop", marks=pytest.mark.nightly),
    ],
)
def test_two_steps_with_a_random_qwen2(name: str, engine: tuple[str, ...], tmp_path: Path):
    model, run = tmp_path / "model", tmp_path / "run"
    write_qwen2(model, [path.read_text() for path in FOLDER.glob("*.yaml")])
    overrides = [f"pretrain={model}", f"output_dir={run}", *SMALL, *engine]
    if name == "webshop":  # in the files that WebShop publishes
        overrides.append(f"custom_envs.WebShop.env_config.data_dir={write_shop(tmp_path / 'shop', 24)}")
    command = [sys.executable, "-m", "offbeat.deploy.cli.app", "train", str(FOLDER / f"{name}.yaml"), *overrides]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((run / "report.json").read_text())
    assert (report["steps"], report["groups_trained"]) == (2, 4)
    start, trained = (load_file(path / "model.safetensors") for path in (model, run / "checkpoints" / "step-000002"))
    assert start.keys() == trained.keys()
    assert all(not torch.equal(start[name], trained[name]) for name in start if "proj.weight" in name)
