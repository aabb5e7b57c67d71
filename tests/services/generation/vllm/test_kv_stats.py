"""The mean usage and the count of preemptions, by a clock of the test's own."""

from types import SimpleNamespace

import pytest

from offbeat.services.generation.vllm.kv_stats import MEAN_OVER_S, RECENT_S, KvStats


class Steps:
    def __init__(self) -> None:
        self.now = 100.0
        self.stats = KvStats(clock=lambda: self.now)

    def step(self, usage: float, *, after_s: float = 0.1, preempted: int = 0) -> None:
        self.now += after_s
        self.stats.record(SimpleNamespace(kv_cache_usage=usage), SimpleNamespace(num_preempted_reqs=preempted))


def test_the_usage_is_a_mean_over_seconds() -> None:
    steps = Steps()
    for _ in range(200):
        steps.step(0.8)
    assert steps.stats.load(64).usage == pytest.approx(0.8, abs=0.01)
    steps.step(0.0)  # a step between two prompts
    assert steps.stats.load(64).usage == pytest.approx(0.8, abs=0.05)
    assert steps.stats.load(64, kept=0.3).usage == pytest.approx(0.5, abs=0.05)
    assert steps.stats.load(64, kept=0.9).usage == 0.0


def test_an_engine_without_steps_holds_nothing() -> None:
    steps = Steps()
    for _ in range(200):
        steps.step(0.8)
    steps.now += 10 * MEAN_OVER_S
    assert steps.stats.load(64).usage < 0.01


def test_preemptions_are_counted_since_the_start_and_of_late() -> None:
    steps = Steps()
    steps.step(0.5, preempted=3)
    steps.step(0.5, preempted=2, after_s=RECENT_S / 2)
    assert steps.stats.load(64)[1:] == (5, 5, 64)
    steps.now += 0.75 * RECENT_S
    assert steps.stats.load(64)[1:] == (5, 2, 64)
    steps.now += RECENT_S
    assert steps.stats.load(64)[1:] == (5, 0, 64)


def test_steps_without_statistics_change_nothing() -> None:
    steps = Steps()
    steps.stats.record(None, None)
    assert steps.stats.load(64) == (0.0, 0, 0, 64)
