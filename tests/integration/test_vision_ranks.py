"""Two ranks train a policy with image input as one does, although their passes differ in whether they have images."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offbeat.services.process import free_port
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig, TinyVisionConfig
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.integration.vision_rank import ENGINES, learned
from tests.paths import ROOT

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    write_tiny_policy(folder, TinyPolicyConfig(num_hidden_layers=2, vision=TinyVisionConfig()), list("abcdef"))
    return folder


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    with process_group(ranks_of_environment("cpu")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def out(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks wrote."""
    out = tmp_path_factory.mktemp("out")
    command = [sys.executable, str(Path(__file__).with_name("vision_rank.py")), str(folder), str(out)]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    running = [
        subprocess.Popen(command, env={**os.environ, **address, "RANK": str(rank), "PYTHONPATH": str(ROOT)})
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=500) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return out


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_learn_what_one_learns(engine: str, folder: Path, out: Path, ranks: Ranks) -> None:
    alone, together = learned(folder, engine, ranks), load_file(out / f"{engine}.safetensors")
    assert alone.keys() == together.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(tensor, together[name], rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
