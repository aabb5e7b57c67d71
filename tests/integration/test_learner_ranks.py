"""Two learner processes learn what one learns, with algorithms that look at whole sequences, turns and batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offbeat.services.process import free_port
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.integration.algorithm_rank import ALGORITHMS
from tests.paths import ROOT


def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    out.mkdir()
    write_tiny_policy(model, TinyPolicyConfig(num_hidden_layers=1), ["a", "b", "c", "d"])
    script, root = Path(__file__).with_name("algorithm_rank.py"), str(ROOT)
    running = []
    for world in (1, 2):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
        running += [
            subprocess.Popen(
                [sys.executable, str(script), str(model), str(out)],
                env={**os.environ, **address, "RANK": str(rank), "PYTHONPATH": root},
            )
            for rank in range(world)
        ]
    assert [process.wait(timeout=240) for process in running] == [0, 0, 0]
    for name in ALGORITHMS:
        one, two = (load_file(out / f"{name}-of-{world}.safetensors") for world in (1, 2))
        assert one.keys() == two.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(tensor, two[key], rtol=0, atol=2e-5)
        of_one, of_two = (json.loads((out / f"{name}-of-{world}.json").read_text()) for world in (1, 2))
        assert of_two == pytest.approx(of_one, rel=1e-3, abs=1e-4)
