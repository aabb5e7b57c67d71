"""Qwen3.5's configuration runs as it stands, with a small random model of that architecture."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.hybrid_policy import random_hybrid, write_hybrid
from tests.paths import CONFIGS, ROOT
from tests.qwen2 import write_tokenizer

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]

CONFIG = CONFIGS / "qwen3.5" / "frozen_lake.yaml"
SMALL = (
    *("max_steps=3", "rollout_batch_size=8", "train_env_manager.num_env_groups=2", "train_env_manager.group_size=4"),
    *("eval_steps=0", "final_val_batch_size=4", "save_steps=3", "actor_infer.kv_cache_gib=0.25"),
    *("zero_variance=train", "entropy_loss_coef=0.01"),  # random weights get no reward that distinguishes answers
    *("actor_train.training_args.learning_rate=1e-3", "actor_train.training_args.warmup_steps=0"),
)


def write_qwen3_5(folder: Path, kind: str) -> None:
    tokenizer = write_tokenizer(folder, [CONFIG.read_text()], "qwen3_5_nothink")
    size, stop = -(-len(tokenizer) // 128) * 128 + 128, tokenizer.eos_token_id
    ids = {"vocab_size": size, "max_position_embeddings": 4096, "eos_token_id": stop, "bos_token_id": None}
    write_hybrid(folder, kind, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id, **ids)
    random_hybrid(folder, 0, 0.02).bfloat16().save_pretrained(folder)


@pytest.mark.parametrize("kind", [pytest.param("qwen3_5_text", marks=pytest.mark.nightly), "qwen3_5"])
def test_three_steps_with_a_random_qwen3_5(kind: str, tmp_path: Path):
    model, run = tmp_path / "model", tmp_path / "run"
    write_qwen3_5(model, kind)
    overrides = [f"pretrain={model}", f"output_dir={run}", *SMALL]
    for command in (["train", str(CONFIG), *overrides], ["audit", str(run)]):
        line = [sys.executable, "-m", "offbeat.deploy.cli.app", *command]
        done = subprocess.run(line, check=False, cwd=ROOT, capture_output=True, text=True, timeout=560)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((run / "report.json").read_text())
    assert (report["steps"], report["groups_trained"]) == (3, 6)
    start, trained = (load_file(path / "model.safetensors") for path in (model, run / "checkpoints" / "step-000003"))
    assert start.keys() == trained.keys()
    assert report["mismatch_kl"] < 2e-3, "recorded logprobs are the learner's, up to bfloat16"
    matrices = [name for name in start if "proj" in name or "conv1d" in name]
    assert all(torch.equal(start[name], trained[name]) == ("visual" in name) for name in matrices)
