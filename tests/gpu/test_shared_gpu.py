"""Engine and learner on one GPU by default, synchronous ones in turns: `pytest tests/gpu/test_shared_gpu.py` on a GPU."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.paths import ROOT

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("transport", ["shm", "ipc"])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_engine_and_learner_train_on_one_gpu(transport: str, max_staleness: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [
        str(ROOT / ".venv/bin/offbeat"),
        *("train", "quickstart", f"output_dir={run}", "max_steps=3", "final_val_batch_size=8", "warm_start.steps=5"),
        *("actor_train.device=cuda", "actor_infer.device=cuda"),
        *(f"weights.transport={transport}", f"max_staleness={max_staleness}"),
    ]
    subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"}, check=True, timeout=800)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(line.get("step", 0) for line in steps) >= 3
    logs = "".join(log.read_text() for log in (run / "logs").glob("generation-*.log"))
    assert ("asleep: the learner has its devices" in logs) == (max_staleness == 0)
