"""What the benchmarks compute from what they measured."""

import asyncio
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest

from offbeat.benchmarks.async_training import (
    ProgressPoint,
    RunResult,
    UnboundedRates,
    reward_until,
    summary,
)
from offbeat.benchmarks.buffer.comparison import summary as buffer_summary
from offbeat.benchmarks.buffer.load import Rates
from offbeat.benchmarks.generation import summary as generation_summary
from offbeat.benchmarks.harness.load import (
    Prompts,
    RoundLoad,
    quantile,
    under_load,
)
from offbeat.benchmarks.harness.result import Spread, cell, write_json
from offbeat.benchmarks.harness.slow_lake import Latency
from offbeat.benchmarks.redundancy import with_ratios
from offbeat.benchmarks.scale import cost_spread
from offbeat.services.messages.types import GenerateRequest


def setting(bound: float, rate: float, rewards: tuple[float, ...], step_s: float) -> RunResult:
    curve = tuple(ProgressPoint(64 * (i + 1), step_s * (i + 1), reward) for i, reward in enumerate(rewards))
    return RunResult("normal", bound, rate, step_s, 0.5, 0.25, bound, bound, 0, curve)


def test_ratios_refer_to_the_synchronous_run_and_the_slower_side() -> None:
    sync = setting(0.0, 20.0, (0.1, 0.2), 4.0)
    result = summary(
        "normal", UnboundedRates(rollout=60.0, training=100.0), [sync, setting(1.0, 50.0, (0.1, 0.2), 1.0)]
    )
    assert result["ideal"] == 60.0
    assert [row["ratio"] for row in result["settings"]] == [1.0, 2.5]
    assert [row["share_of_ideal"] for row in result["settings"]] == [20 / 60, 50 / 60]


def test_rewards_are_compared_at_equal_trajectories_and_at_equal_time() -> None:
    sync = setting(0.0, 16.0, (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), 4.0)
    fast = setting(1.0, 64.0, (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), 1.0)
    result = summary("normal", UnboundedRates(64.0, 64.0), [sync, fast])
    rows = result["settings"]
    assert result["equal_time_s"] == 8.0
    assert [row["reward_at_equal_trajectories"] for row in rows] == pytest.approx([0.55, 0.55])
    assert [row["reward_at_equal_time"] for row in rows] == pytest.approx([0.05, 0.55])


def test_no_reward_is_claimed_before_the_first_step() -> None:
    assert reward_until((ProgressPoint(64, 5.0, 0.3),), lambda p: p.seconds <= 4.0) is None


@pytest.mark.parametrize("distribution", ["normal", "lognormal"])
def test_latencies_have_the_mean_and_the_deviation_that_are_asked_for(distribution: str) -> None:
    latency = Latency.model_validate({"distribution": distribution, "mean_s": 0.2, "std_s": 0.05})
    rng = np.random.default_rng(0)
    drawn = np.array([latency.draw(rng) for _ in range(20_000)])
    assert drawn.mean() == pytest.approx(0.2, rel=0.02)
    assert drawn.std() == pytest.approx(0.05, rel=0.05)
    assert drawn.min() >= 0


def test_a_latency_without_a_mean_takes_no_time() -> None:
    assert Latency(distribution="lognormal").draw(np.random.default_rng(0)) == 0.0


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50.0), (0.99, 99.0), (1.0, 100.0)])
def test_a_quantile_is_the_value_that_so_many_do_not_exceed(share: float, expected: float) -> None:
    assert quantile([float(i) for i in range(100, 0, -1)], share) == expected


async def test_tokens_of_requests_that_run_at_the_same_time_all_count() -> None:
    running = peak = 0

    async def call(_: GenerateRequest) -> int:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 3

    requests = Prompts(vocab_size=10, tokens=3, seed=0).take(20)
    began = time.perf_counter()
    load = await under_load(call, requests, concurrency=5)
    wall_s = time.perf_counter() - began
    assert peak == 5
    assert 60 / wall_s <= load.tokens_per_s <= 60 / (4 * 0.01)  # four requests after one another by each of the five


def test_service_and_bare_engine_are_compared_at_their_best() -> None:
    loads = {
        1: {"bare": [RoundLoad(100.0, 1.0, 2.0)], "handle": [RoundLoad(60.0, 1.0, 2.0)]},
        64: {"bare": [RoundLoad(900.0, 1.0, 2.0), RoundLoad(1000.0, 1.0, 2.0), RoundLoad(1100.0, 1.0, 2.0)]}
        | {"handle": [RoundLoad(800.0, 1.0, 2.0)]},
        256: {"bare": [RoundLoad(950.0, 1.0, 2.0)], "handle": [RoundLoad(900.0, 1.0, 2.0)]},
    }
    result = generation_summary(loads)
    assert [row["ratio"] for row in result["levels"]] == pytest.approx([0.6, 0.8, 900 / 950])
    assert result["saturated_from"] == 64
    assert result["saturated_ratio"] == 0.9


def test_the_buffer_is_compared_round_by_round() -> None:
    ours = [Rates(100.0, 300.0), Rates(50.0, 150.0), Rates(200.0, 200.0)]
    result = buffer_summary({"offbeat": ours, "raw": [Rates(200.0, 300.0), Rates(50.0, 75.0), Rates(100.0, 50.0)]})
    assert result["sides"]["offbeat"]["both"].median == pytest.approx(75.0)
    assert result["ratios"]["raw"]["into"].median == 1.0
    assert result["ratios"]["raw"]["out"].median == 2.0
    assert "offbeat" not in result["ratios"]


def test_redundancy_is_compared_by_medians_with_none() -> None:
    rows = [{"batch_s": Spread.of([10.0, 12.0, 30.0])}, {"batch_s": Spread.of([3.0, 2.0])}]
    assert [row["ratio"] for row in with_ratios(rows)] == pytest.approx([1.0, 4.8])


def test_a_result_is_stored_with_machine_and_options(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "result.json"
    write_json(file, "async", {"steps": 3, "model": Path("x")}, {"rate": Spread.of([3.0, 1.0, 2.0])})
    stored = json.loads(file.read_text())
    assert stored["bench"] == "async"
    assert stored["options"] == {"steps": 3, "model": "x"}
    assert stored["rate"] == {"median": 2.0, "low": 1.0, "high": 3.0, "rounds": 3}
    assert stored["machine"]["cpus"] >= 1


@pytest.mark.parametrize(
    ("value", "shown"), [(12345.6, "12,346"), (0.12345, "0.123"), (None, ""), (3, "3"), (math.inf, "inf")]
)
def test_numbers_are_shown_with_the_digits_that_mean_something(value: object, shown: str) -> None:
    assert cell(value) == shown


def test_drift_between_rounds_does_not_count_as_cost():
    assert cost_spread([[1.0, 2.0, 4.0], [1.1, 2.2, 4.4], [1.2, 2.4, 4.8]]) == pytest.approx(0.2)


def test_cost_of_a_setting_is_the_median_of_its_rounds():
    assert cost_spread([[1.0, 1.0, 1.0], [1.1, 5.0, 1.1]]) == pytest.approx(0.1)
    assert cost_spread([[0.7], [0.7]]) == 0.0
