"""Tensor, pipeline and sequence parallelism over GPUs learn what one learns, between turns of an engine, after a killed
rank, and from each other's checkpoints: `pytest tests/gpu/test_layouts_gpu.py`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offbeat.services.process import free_port
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.engines.process_group import process_group, ranks_of_environment
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.integration.layout_rank import STEPS, Layout, engine_of, learn
from tests.integration.test_stage_kill import LAYOUTS, check_killed_rank, undisturbed_run

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

SPLIT: dict[str, Layout] = {"tensor": (2, 1), "pipeline": (1, 2), "ulysses": (1, 1, 2)}


def test_two_gpus_learn_what_one_learns(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_tiny_policy(model, TinyPolicyConfig(num_hidden_layers=3), list("abcdefg"))
    for world in (1, 2):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
        shared = {**os.environ, **address, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, __file__, str(model), str(tmp_path)]
        running = [
            subprocess.Popen(command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(world)
        ]
        assert [process.wait(timeout=300) for process in running] == [0] * world
    alone = load_file(tmp_path / "alone.safetensors")
    for name in (*SPLIT, *(f"{name}-resumed" for name in SPLIT)):
        for key, tensor in load_file(tmp_path / f"{name}.safetensors").items():
            torch.testing.assert_close(
                tensor, alone[key], rtol=1e-3, atol=1e-4, msg=lambda m, n=name, k=key: f"{n} {k}: {m}"
            )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_killed_rank_ends_all_and_the_run_ends_as_if_undisturbed(
    redis_server: str, tmp_path: Path, name: str
) -> None:
    """With a split reference, and states that leave the GPUs between steps."""
    if torch.cuda.device_count() < LAYOUTS[name].num_processes:
        pytest.skip(f"needs {LAYOUTS[name].num_processes} GPUs")
    cuda = ("actor_train.device=cuda", "actor_infer.device=cpu")
    with undisturbed_run(redis_server, tmp_path, *cuda) as undisturbed:
        check_killed_rank(redis_server, tmp_path, name, undisturbed, *cuda, atol=1e-3)


def train(model: Path, out: Path) -> None:
    """Write what this world learns in each of its layouts."""
    results: dict[str, dict[str, Tensor]] = {}
    with process_group(ranks_of_environment("cuda")) as ranks:
        layouts: dict[str, Layout] = {"alone": (1, 1)} if ranks.world_size == 1 else SPLIT
        for name, layout in layouts.items():
            engine = engine_of(model, ranks, layout)
            learn(engine, STEPS - 1)
            engine.save(out / f"{name}-state")
            results[name] = learn(engine, 1)
        for name, other in zip(layouts, reversed(layouts), strict=True):
            engine = engine_of(model, ranks, layouts[name])
            engine.load(out / f"{other}-state")
            results[f"{name}-resumed"] = learn(engine, 1)
        if ranks.rank == 0:
            for name, tensors in results.items():
                save_file({key: each.cpu().contiguous() for key, each in tensors.items()}, out / f"{name}.safetensors")


if __name__ == "__main__":
    train(Path(sys.argv[1]), Path(sys.argv[2]))
