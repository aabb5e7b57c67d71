"""Recipes of tinker-cookbook, unchanged, against Tinker's API: `make test-cookbook`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from offbeat.benchmarks.tinker.server import RunningServer, running_server
from tests.pretrained import write_llama

PYTHON = Path(sys.prefix) / "cookbook" / "bin" / "python"
REWARD = "env/all/reward/total"
RL_STEPS = 60
COMMON = (
    "renderer_name=role_colon",
    "lora_rank=16",
    "behavior_if_log_dir_exists=raise",
    "save_every=4",
    "eval_every=0",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs tinker-cookbook: make test-cookbook"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama"
    write_llama(folder)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("cookbook") / "run"
    with running_server(folder, f"pretrain={model}", "warm_start=null", "sequence_length=512") as server:
        yield server


def run_recipe(server: RunningServer, model: Path, log: Path, recipe: str, *settings: str) -> None:
    command = [str(PYTHON), "-m", f"tinker_cookbook.recipes.{recipe}", f"base_url={server.url}", f"model_name={model}"]
    environment = os.environ | {"TINKER_API_KEY": "tml-cookbook", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    done = subprocess.run(
        [*command, f"log_path={log}", *COMMON, *settings],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def supervised(server: RunningServer, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Log of the supervised recipe on sums."""
    folder = tmp_path_factory.mktemp("supervised")
    data, log = folder / "sums.jsonl", folder / "log"
    data.write_text("".join(json.dumps({"messages": _sum(a, b)}) + "\n" for a in range(16) for b in range(16)))
    run_recipe(
        server, model, log, "chat_sl.train", f"dataset={data}", "batch_size=32", "num_epochs=3", "learning_rate=1e-2"
    )
    return log


def test_the_supervised_recipe_learns(supervised: Path) -> None:
    losses = [step["train_mean_nll"] for step in read_lines(supervised / "metrics.jsonl") if "train_mean_nll" in step]
    assert len(losses) == 24
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("settings", [(), ("max_steps_off_policy=1",)], ids=["synchronous", "asynchronous"])
def test_the_rl_recipe_learns_from_where_the_supervised_one_ended(
    server: RunningServer, model: Path, supervised: Path, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    """Answers learn to end in time; the sums themselves are beyond two random layers and so few steps."""
    log = tmp_path / "log"
    start = read_lines(supervised / "checkpoints.jsonl")[-1]["state_path"]
    run_recipe(
        server, model, log, "math_rl.train", f"load_checkpoint_path={start}", "env=arithmetic", "loss_fn=ppo",
        "groups_per_batch=8", "group_size=8", "max_tokens=12", "learning_rate=1e-3", f"max_steps={RL_STEPS}", *settings,
    )  # fmt: skip
    rewards = [step[REWARD] for step in read_lines(log / "metrics.jsonl") if REWARD in step]
    assert len(rewards) == RL_STEPS
    assert fmean(rewards[-10:]) > fmean(rewards[:10]) + 0.02
    assert read_lines(log / "checkpoints.jsonl")[-1]["name"] == "final"


def _sum(a: int, b: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": str(a + b)}]
