"""The benchmarks that need no engine, run as a user runs them, in seconds."""

import json
import multiprocessing
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from offbeat.benchmarks import scale
from offbeat.deploy.cli.app import app

pytestmark = pytest.mark.slow


def result_of(folder: Path, *arguments: str) -> dict[str, Any]:
    file, before = folder / "result.json", set(multiprocessing.active_children())
    outcome = CliRunner().invoke(app, ["bench", *arguments, "--quick", "--json", str(file)], catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    assert set(multiprocessing.active_children()) <= before
    return json.loads(file.read_text())


def test_async_compares_both_ways_of_working_with_the_ideal(tmp_path: Path) -> None:
    (result,) = result_of(tmp_path, "async")["distributions"]
    sync, late = result["settings"]
    assert (sync["max_staleness"], sync["ratio"], sync["staleness_max"]) == (0.0, 1.0, 0.0)
    assert late["max_staleness"] == 1.0
    assert late["staleness_max"] <= 1.0
    assert late["ratio"] == late["trajectories_per_s"] / sync["trajectories_per_s"]
    assert result["ideal"] == min(result["rollout_alone"], result["training_alone"]) > 0
    assert len(sync["curve"]) == len(late["curve"]) == 4


def test_redundant_episodes_do_not_change_the_collected_batch(tmp_path: Path) -> None:
    result = result_of(tmp_path, "redundancy")["distributions"]
    plain, redundant = result["lognormal"]
    assert (plain["groups"], plain["members"]) == (4, 2)
    assert (redundant["groups"], redundant["members"]) == (5, 3)
    assert plain["cancelled"] == 0
    assert min(plain["batch_s"]["median"], redundant["batch_s"]["median"]) > 0


def test_scale_reports_the_cost_of_an_episode(tmp_path: Path) -> None:
    result = result_of(tmp_path, "scale")
    assert [row["concurrency"] for row in result["settings"]] == [16, 64]
    for row in result["settings"]:
        assert row["cpu_ms"]["median"] >= row["worker_cpu_ms"]["median"] > 0
        assert row["trajectories_per_s"]["median"] > 0


@pytest.mark.parametrize("count", [12, 16])
def test_scale_plays_as_many_episodes_at_a_time_as_it_reports(count: int) -> None:
    with scale.bench_environment() as base:
        config = scale._ConcurrencyRun(scale.ScaleOptions(), base, cast(Any, None), count)._config()
    assert config.rollout.max_env_num_per_worker == count
    assert config.train_env_manager.num_env_groups == 2


def test_buffer_moves_the_same_groups_through_both_sides(tmp_path: Path) -> None:
    result = result_of(tmp_path, "buffer", "--fsync")
    (row,) = result["loads"]
    assert set(row["sides"]) == {"offbeat", "raw", "raw_codec", "raw_pipelined", "appendfsync always"}
    assert result["reverb_left_out"]
    for name in ("raw", "raw_codec", "raw_pipelined", "appendfsync always"):
        for part in ("into", "out", "both"):
            assert row["ratios"][name][part]["median"] > 0


def test_plan_predicts_each_row_from_another(tmp_path: Path) -> None:
    rows = result_of(tmp_path, "plan")["predictions"]
    bounds, redundant = rows["async, lognormal"], rows["redundancy, lognormal"]
    assert [(row["row"], row["from_row"]) for row in bounds] == [
        ("max_staleness 0", "max_staleness 1"),
        ("max_staleness 1", "max_staleness 0"),
    ]
    assert [(row["row"], row["from_row"]) for row in redundant] == [("5 x 3", "4 x 2")]
    assert bounds[0]["lags"] == bounds[0]["measured_lags"] == [1.0]
    assert sum(bounds[1]["lags"]) == pytest.approx(1.0)
    for row in (*bounds, *redundant):
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)


def test_weights_are_published_to_an_engine_that_generates(tmp_path: Path) -> None:
    result = result_of(tmp_path, "weights")
    (row,) = result["settings"]
    assert (row["size"], row["replicas"]) == ("1M", 1)
    assert 0 < row["blocked_s"]["median"] <= row["announced_s"]["median"] < row["served_s"]["median"]
    assert row["pause_s"]["median"] > 0
    assert row["engine_step_s"] > 0
    (deltas,) = result["deltas"]
    assert (deltas["differences"], deltas["versions"]) == (2, 3)


def test_the_console_is_measured_on_an_active_run(tmp_path: Path) -> None:
    result = result_of(tmp_path, "console")
    assert result["trajectories"] > 640
    rows = {row["name"]: row for row in result["calls"]}
    assert {"groups by spread", "trajectory", "6 series by time", "pause", "change of settings"} <= rows.keys()
    assert all(row["first_ms"] > 0 and row["ms"]["median"] > 0 and row["bytes"] > 0 for row in rows.values())
    assert result["costs"][0]["name"] == "no page open"
    assert len(result["costs"]) == 1 + len(result["pictures"])
