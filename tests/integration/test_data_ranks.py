"""Data pipelines train alike under every engine, cut and number of processes, with LoRA and with a shared prefix."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from offbeat.envs.frozen_lake.rows import conversations, pairs, write_rows
from offbeat.services.process import free_port
from tests.forked import ForkedProcess
from tests.integration.data_rank import CASES, PIPELINES, ROWS, STEPS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # three ranks beside the tests of the mesh, on two cores

NAMES = (*CASES, "accumulated")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process and two wrote."""
    folder = tmp_path_factory.mktemp("data-ranks")
    for name, make in (("sft", conversations), ("dpo", pairs)):
        write_rows(folder / f"{name}.jsonl", make(6 * ROWS))
        write_rows(folder / f"{name}_val.jsonl", make(4, seed=1))
    script = Path(__file__).with_name("data_rank.py")
    running: list[ForkedProcess] = []
    for world in (1, 2):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
        for rank in range(world):
            environment = {**os.environ, **address, "RANK": str(rank), "OMP_NUM_THREADS": "1"}
            running.append(ForkedProcess([script, folder], env=environment))
    assert [process.wait(timeout=500) for process in running] == [0, 0, 0]
    return folder / "out"


def curve(folder: Path, name: str, world: int) -> list[dict[str, float]]:
    """Gauges of each step, and of validation rows after the last."""
    steps: list[dict[str, float]] = json.loads((folder / f"{name}-of-{world}.json").read_text())
    steps[0].pop("rewards/accuracies", None)  # policy and reference are equal: which is greater is rounding
    return steps


def weights(folder: Path, name: str, world: int) -> dict[str, Tensor]:
    return load_file(folder / f"{name}-of-{world}.safetensors")


def reference_of(pipeline: str, name: str) -> str:
    return f"{pipeline} lora" if name.startswith("lora") else f"{pipeline} plain"


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_losses_and_weights_are_those_of_one_process(folder: Path, pipeline: str, name: str, world: int) -> None:
    expected = reference_of(pipeline, name)
    for ours, theirs in zip(curve(folder, f"{pipeline} {name}", world), curve(folder, expected, 1), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    first = weights(folder, expected, 1)
    for key, tensor in weights(folder, f"{pipeline} {name}", world).items():
        torch.testing.assert_close(tensor, first[key], rtol=0, atol=2e-6, msg=f"{name}: {key}")


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("name", ["plain", "lora"])
def test_training_lowers_the_loss(folder: Path, pipeline: str, name: str) -> None:
    steps = curve(folder, f"{pipeline} {name}", 1)
    assert len(steps) == STEPS + 1
    assert steps[-1]["loss"] < steps[0]["loss"]


@pytest.mark.parametrize("name", NAMES)
def test_a_references_margins_are_zero_until_the_policy_moves(folder: Path, name: str) -> None:
    """With LoRA, the reference is the policy with its adapters off."""
    steps: list[dict[str, Any]] = curve(folder, f"dpo {name}", 2)
    assert steps[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert abs(steps[1]["rewards/margins"]) > 1e-3
