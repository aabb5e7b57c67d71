"""A pipeline stage that is killed ends the whole learner, and its successor finishes the run."""

from pathlib import Path

import psutil
import pytest

from tests.integration.learner_run import a_run
from tests.waiting import wait_until_sync

STAGES = (
    "actor_train.num_processes=2",
    "actor_train.strategy_args.strategy_name=fsdp2_train",
    "actor_train.strategy_args.pp_size=2",
    "tiny.num_hidden_layers=2",
    "max_steps=4",
)


def stage_of(learner: int) -> psutil.Process:
    """Return the process of rank 1, the first stage."""
    children = psutil.Process(learner).children(recursive=True)
    (stage,) = [child for child in children if child.environ().get("RANK") == "1"]
    return stage


@pytest.mark.timeout(300)
def test_a_killed_stage_ends_all_and_the_run_continues(redis_server: str, tmp_path: Path) -> None:
    with a_run(redis_server, tmp_path, "stages", STAGES) as run:
        learner = run.start()
        wait_until_sync(lambda: run.published() >= 2, timeout_s=120)
        stage_of(learner.pid).kill()
        assert learner.wait(timeout=60) != 0
        assert "rank 1" in (run.config.output_dir / "logs" / "learner.log").read_text()
        assert run.start().wait(timeout=120) == 0, run.complaint()
        counters = run.counters()
        assert (counters.admitted, counters.trained, counters.in_flight) == (8, 8, 0)
        steps = [record for record in run.records() if record.source == "learner" and record.step is not None]
        assert {record.step for record in steps} == {1, 2, 3, 4}
        assert all(record.values["actor/grad_norm"].value > 0 for record in steps)
