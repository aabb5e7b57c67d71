"""`offbeat bench async` with rollouts that end."""

from typing import Any

import pytest

from offbeat.benchmarks.async_training import AsyncBench, AsyncOptions
from offbeat.benchmarks.harness.environment import bench_environment
from offbeat.benchmarks.harness.learner import TimedTrainer


class Ended:
    """Rollouts whose process has ended once they were to play."""

    def start_run(self, settings: Any) -> None:
        self.settings = settings

    def check(self) -> None:
        raise RuntimeError("the env worker ended")


@pytest.mark.timeout(60)
def test_a_learner_does_not_wait_for_rollouts_that_have_ended() -> None:
    options = AsyncOptions(work="emulated", steps=3, batch=16, env_groups=4, train_s=0.01)
    rollouts: Any = Ended()
    with bench_environment() as base:
        bench = AsyncBench(options, base, rollouts, lambda _: TimedTrainer(0.01))
        with pytest.raises(RuntimeError, match="the env worker ended"):
            bench.setting("lognormal", 1.0, lambda _: None)
