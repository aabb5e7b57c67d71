"""Refilled groups of a killed learner: the successor repeats its steps on the same groups, with the same statistics."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

from offbeat.deploy.cli.audit import audit_run
from offbeat.trainer.learner.step_ledger import StepLine, read_step_ledger
from tests.integration.learner_run import Run, a_run
from tests.waiting import wait_until_sync

REFILL = (
    "save_steps=4", "eval_steps=0", "zero_variance=refill", "+max_refill_ratio=0.5",
    "reward_normalization={method: null, norm_mean_type: running, norm_std_type: running}", "difficulty_mask=true",
    "difficulty_low_threshold=0.3", "max_staleness=1",
)  # fmt: skip


pytestmark = pytest.mark.timeout(600)


def steps_of(run: Run) -> dict[int, tuple[list[int], tuple[int, ...]]]:
    """Return groups and refilled groups of each step, as last trained."""
    lines, _ = read_step_ledger(run.config.output_dir)
    return {
        line.step: ([group.number for group in line.groups], line.refilled)
        for line in lines
        if isinstance(line, StepLine)
    }


def test_a_killed_learners_successor_refills_the_same_groups(
    redis_server: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with a_run(redis_server, tmp_path, "intact", REFILL) as intact:
        assert intact.start().wait(timeout=240) == 0
        steps, counters, weights = steps_of(intact), intact.counters(), intact.weights(6)
    assert sum(len(refilled) for _, refilled in steps.values()) >= 2, steps
    with a_run(redis_server, tmp_path, "killed", REFILL) as run:
        victim = run.start()
        wait_until_sync(lambda: run.published() >= 3, timeout_s=240)
        victim.kill()
        victim.wait()
        assert run.start().wait(timeout=240) == 0
        assert steps_of(run) == steps
        assert run.counters() == counters
        (run.config.output_dir / "config.yaml").write_text(run.config.model_dump_json())
        assert audit_run(str(run.config.output_dir), console=Console(width=200), redis_url=redis_server) == 0
        assert "PROVEN" in capfd.readouterr().out
        for name, tensor in weights.items():
            assert torch.equal(tensor, run.weights(6)[name]), name
