"""Recipes of tinker-cookbook, unchanged, against Tinker's API: `make test-cookbook`."""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

from offbeat.benchmarks.harness.pretrained import write_llama
from offbeat.benchmarks.studies.tinker_kills import (
    PARTS,
    Killer,
    find_differences,
    record_under_kills,
    train_with_cookbook,
)
from offbeat.benchmarks.tinker.cookbook import PYTHON, last_checkpoint, read_lines, run_recipe, write_sums
from offbeat.benchmarks.tinker.server import RunningServer, running_server

KEY = "tml-cookbook"
REWARD = "env/all/reward/total"
RL_STEPS = 60
TIMEOUT_S = 280.0
COMMON = (
    "lora_rank=16",
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


@pytest.fixture(scope="module")
def supervised(server: RunningServer, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Log of the supervised recipe on sums."""
    folder = tmp_path_factory.mktemp("supervised")
    data, log = folder / "sums.jsonl", folder / "log"
    write_sums(data)
    run_recipe(
        *("chat_sl.train", server.url, KEY, model, log, *COMMON),
        *(f"dataset={data}", "batch_size=32", "num_epochs=3", "learning_rate=1e-2"),
        timeout_s=TIMEOUT_S,
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
    run_recipe(
        *(
            "math_rl.train",
            server.url,
            KEY,
            model,
            log,
            *COMMON,
            f"load_checkpoint_path={last_checkpoint(supervised)}",
            "env=arithmetic",
        ),
        *("loss_fn=ppo", "groups_per_batch=8", "group_size=8", "max_tokens=12", "learning_rate=1e-3"),
        *(f"max_steps={RL_STEPS}", *settings),
        timeout_s=TIMEOUT_S,
    )
    rewards = [step[REWARD] for step in read_lines(log / "metrics.jsonl") if REWARD in step]
    assert len(rewards) == RL_STEPS
    assert fmean(rewards[-10:]) > fmean(rewards[:10]) + 0.02
    assert read_lines(log / "checkpoints.jsonl")[-1]["name"] == "final"


@pytest.mark.timeout(1800)
def test_a_recipe_under_kills_ends_as_the_same_commands_undisturbed(
    server: RunningServer, model: Path, tmp_path: Path
) -> None:
    """`rl.train` only waits while each part dies."""
    kills = len(PARTS)
    workload = train_with_cookbook(model, tmp_path, kills)
    recorded = record_under_kills(server, workload, Killer(server, kills, seed=1))
    assert sorted(recorded.kills) == sorted(PARTS)
    assert find_differences(server, recorded) == []
    assert any(step.get("grad_norm") for step in read_lines(tmp_path / "rl" / "metrics.jsonl"))
