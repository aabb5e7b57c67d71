"""A killed rank ends the whole learner, in each layout, and its successor ends with the weights of an undisturbed run.

The reference is split as the policy is, and the learner leaves the devices between steps, as if an engine shared them.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.integration.learner_run import Run, a_run, rank_of
from tests.waiting import wait_until_sync

STEPS = 2
START_TIMEOUT_S = 300.0
"""Of four processes on two busy cores, which took 100 s to start."""
STRATEGY = "actor_train.strategy_args"
SETTINGS = (
    f"{STRATEGY}.strategy_name=fsdp2_train",
    "tiny.num_hidden_layers=2",
    f"max_steps={STEPS}",
    "save_steps=1",
    "eval_steps=0",
    "use_kl_loss=true",
    "kl_loss_coef=0.05",
    "max_staleness=0",
)
TURNS = "actor_infer.strategy_args.strategy_config.enable_sleep_mode=true"


class Layout(NamedTuple):
    num_processes: int
    settings: tuple[str, ...]
    victim: int
    """Rank to kill."""


LAYOUTS = {
    "tp2": Layout(2, (f"{STRATEGY}.tp_size=2",), 1),
    "pp2": Layout(2, (f"{STRATEGY}.pp_size=2",), 1),  # the first stage
    "tp2-dp2": Layout(4, (f"{STRATEGY}.tp_size=2",), 3),
}


@contextmanager
def undisturbed_run(redis_url: str, folder: Path, *settings: str) -> Iterator[Run]:
    """A finished run of one process, without a kill."""
    with a_run(redis_url, folder, "alone", (*SETTINGS, *settings)) as run:
        assert run.start().wait(timeout=START_TIMEOUT_S) == 0, run.complaint()
        yield run


def check_killed_rank(redis_url: str, folder: Path, name: str, undisturbed: Run, *more: str, atol: float) -> None:
    processes, settings, victim = LAYOUTS[name]
    settings = (*SETTINGS, TURNS, "actor_train.num_processes=2", *settings, *more)
    with a_run(redis_url, folder, name, settings, num_processes=processes) as run:
        learner = run.start()
        wait_until_sync(lambda: run.published() >= 1, timeout_s=START_TIMEOUT_S)
        rank_of(learner.pid, victim).kill()
        assert learner.wait(timeout=240) != 0
        log = (run.config.output_dir / "logs" / "learner.log").read_text()
        assert re.search(rf"rank {victim} .*was killed by SIGKILL", log)
        assert "reference is split over 2 processes" in log
        assert run.start().wait(timeout=START_TIMEOUT_S) == 0, run.complaint()
        counters = run.counters()
        assert (counters.admitted, counters.trained, counters.in_flight) == (2 * STEPS, 2 * STEPS, 0)
        steps = [record for record in run.records() if record.source == "learner" and record.step is not None]
        assert {record.step for record in steps} == {1, 2}
        assert all({"actor/grad_norm", "actor/kl_loss", "time/turn_s"} <= record.values.keys() for record in steps)
        weights = run.weights(STEPS)
        for key, tensor in undisturbed.weights(STEPS).items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-5, atol=atol, msg=lambda m, k=key: f"{k}: {m}")


@pytest.fixture(scope="module")
def undisturbed(redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with undisturbed_run(redis_server, tmp_path_factory.mktemp("undisturbed")) as run:
        yield run


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_killed_rank_ends_all_and_the_run_ends_as_if_undisturbed(
    redis_server: str, tmp_path: Path, undisturbed: Run, name: str
) -> None:
    check_killed_rank(redis_server, tmp_path, name, undisturbed, atol=2e-5)
