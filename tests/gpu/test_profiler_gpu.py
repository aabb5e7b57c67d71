"""Profiles of a step on a GPU: its kernels, and what allocated memory."""

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.training.profiler import profile_step
from tests.trainer.training.test_profiler import make_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def test_a_profile_holds_kernels_and_allocations(tmp_path: Path) -> None:
    run = make_run(tmp_path, "actor_train.device=cuda", "profiler_timeline=true", "profiler_memory=true")
    with profile_step(run, Ranks(0, 0, 1, torch.device("cuda", 0)), 3):
        weight = torch.ones(512, 512, device="cuda", requires_grad=True)
        (weight @ weight).sum().backward()
    stem = tmp_path / "profiler" / "step-000003-rank-0"
    with gzip.open(stem.with_suffix(".json.gz")) as file:
        assert any(event.get("cat") == "kernel" for event in json.load(file)["traceEvents"])
    snapshot = pickle.loads(stem.with_suffix(".pickle").read_bytes())
    assert any(event["action"] == "alloc" for trace in snapshot["device_traces"] for event in trace)
