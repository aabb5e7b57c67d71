"""Engines and learner on the same GPUs, side by side and in turns: `pytest tests/gpu/test_shared_gpu.py` on one or two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(900),
]

TOLERANCE = 2e-3
"""Of mean logprobs: .0008 with TF32 on an H200, .06 and more with the weights of the step before."""
ENGINE = "actor_infer.strategy_args.strategy_config"
FEW_BYTES = (f"{ENGINE}.gpu_memory_utilization=0.05", f"{ENGINE}.kv_cache_memory_bytes={1 << 30}")
"""Several tests may share a GPU: vLLM allocates this much, and measures nothing."""

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def train(run: Path, visible: str, *settings: str) -> list[int]:
    """Train three steps; return how often each engine slept, in order."""
    command = [
        *(sys.executable, "-m", "offbeat.deploy.cli.app"),
        *("train", "quickstart", f"output_dir={run}", "max_steps=3", "final_val_batch_size=8", "warm_start.steps=5"),
        *("actor_train.device=cuda", "actor_infer.device=cuda", *FEW_BYTES, *settings),
    ]
    subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": visible}, check=True, timeout=800)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] or 0 for line in steps) >= 3
    logs = [log.read_text() for log in (run / "logs").glob("generation-*.log")]
    return sorted(log.count("asleep: the learner has its devices") for log in logs)


@pytest.mark.parametrize("transport", ["shm", None])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_engine_and_learner_train_on_one_gpu(transport: str | None, max_staleness: int, tmp_path: Path) -> None:
    """By CUDA IPC, if nothing is said of the transport."""
    given = () if transport is None else (f"weights.transport={transport}",)
    (sleeps,) = train(tmp_path / "run", "0", *given, f"max_staleness={max_staleness}")
    assert (sleeps >= 3) == (max_staleness == 0)
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["weights"]["transport"] == (transport or "ipc")
    steps = [json.loads(line)["values"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    differences = [values["actor/mismatch_abs"] for values in steps if "actor/mismatch_abs" in values]
    assert len(differences) >= 3
    assert max_staleness or max(differences) < TOLERANCE, "the engine samples with the newest weights"


@needs_two
def test_an_engine_on_the_learners_gpu_sleeps_while_the_other_samples(tmp_path: Path) -> None:
    mappings = ("actor_train.device_mapping=[1]", "actor_infer.device_mapping=[0,1]")
    sleeps = train(tmp_path / "run", "0,1", *mappings, "max_staleness=1")
    assert len(sleeps) == 2
    assert sleeps[0] == 0
    assert sleeps[1] >= 3


@needs_two
def test_engines_take_turns_with_the_stages_of_a_learner(tmp_path: Path) -> None:
    stages = ("actor_train.strategy_args.strategy_name=fsdp2_train", "actor_train.strategy_args.pp_size=2")
    mappings = ("actor_train.device_mapping=[0,1]", "actor_infer.device_mapping=[0,1]", "tiny.num_hidden_layers=2")
    sleeps = train(tmp_path / "run", "0,1", *stages, *mappings, "max_staleness=0", "use_kl_loss=true")
    assert len(sleeps) == 2
    assert sleeps[0] >= 3
