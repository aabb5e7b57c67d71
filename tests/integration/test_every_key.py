"""One file with every key of the roles' form trains, evaluates, renders, uploads, and resumes from its store."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.integration.test_roll_file import write_player
from tests.paths import ROOT

pytestmark = [pytest.mark.alone, pytest.mark.nightly, pytest.mark.timeout(300)]

FILE = ROOT / "tests" / "integration" / "data" / "every_key.yaml"


def train(model: Path, folder: Path, name: str, *overrides: str) -> Path:
    """Train by ROLL's command; return the run's folder."""
    run = folder / name
    paths = {
        **dict.fromkeys(("pretrain", "reward_pretrain", "reference.model_args.model_name_or_path"), model),
        "output_dir": run,
        "logging_dir": folder / f"{name}-logs",
        "render_save_dir": folder / f"{name}-render",
        "checkpoint_config.output_dir": folder / "store",
    }
    sizes = ("rollout_batch_size=8", "val_batch_size=4", "final_val_batch_size=4", "sequence_length=1024")
    steps = ("max_steps=3", "save_steps=2", "eval_steps=2", "actor_infer.kv_cache_gib=0.25")
    named = ["--config_path", str(FILE.parent), "--config_name", FILE.stem]
    values = [*(f"{key}={path}" for key, path in paths.items()), *sizes, *steps, *overrides]
    command = [sys.executable, "-m", "offbeat.deploy.cli.app", "train", *named, *values]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return run


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_file_of_every_key_trains_and_resumes_from_its_store(tmp_path: Path):
    model = tmp_path / "model"
    write_player(model)
    first = train(model, tmp_path, "first")
    report = json.loads((first / "report.json").read_text())
    assert (report["steps"], report["groups_trained"]) == (3, 6)
    assert {path.name for path in (tmp_path / "first-render").iterdir()} == {"step-0", "step-2", "step-3"}
    assert (tmp_path / "first-logs" / "learner.out").is_file()
    lines = (first / "evaluations" / "after-sampled-3.jsonl").read_text().splitlines()
    assert Counter(json.loads(line)["tag"] for line in lines) == {"Lake": 3, "Grid": 1}
    (stored,) = (tmp_path / "store").iterdir()
    assert any(stored.glob("**/model.safetensors"))
    assert not list((first / "checkpoints").glob("step-*/model.safetensors")), "keep_local_file: false"
    second = train(
        model, tmp_path, "second", f"resume_from_checkpoint=file://{stored}", "max_steps=4", "exp_name=again"
    )
    assert json.loads((second / "report.json").read_text())["steps"] == 4
    saved = yaml.safe_load((second / "config.yaml").read_text())
    assert (saved["actor_train"]["model_args"]["dtype"], saved["old_logprobs"]) == ("bfloat16", "recompute")
