"""`offbeat bench async` with rollouts that end."""

from typing import Any

import pytest

from deploy.bench.asynchrony import AsyncBench, Options
from deploy.bench.ground import ground
from deploy.bench.learning import TimedTrainer


class Ended:
    """Rollouts whose process has ended once they were to play."""

    def play(self, settings: Any) -> None:
        self.settings = settings

    def check(self) -> None:
        raise RuntimeError("the env worker ended")


@pytest.mark.timeout(60)
def test_a_learner_does_not_wait_for_rollouts_that_have_ended() -> None:
    options = Options(work="emulated", steps=3, batch=16, env_groups=4, train_s=0.01)
    rollouts: Any = Ended()
    with ground() as base:
        bench = AsyncBench(options, base, rollouts, lambda _: TimedTrainer(0.01))
        with pytest.raises(RuntimeError, match="the env worker ended"):
            bench.setting("lognormal", 1.0, lambda _: None)
