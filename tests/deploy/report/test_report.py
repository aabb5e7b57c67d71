import io
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from redis import Redis
from rich.console import Console

from offbeat.deploy.cli.report import remake_report
from offbeat.deploy.config.loader import dump_yaml, load_run
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.report.history import RunHistory
from offbeat.deploy.report.report import ReportMaker, build_report, draw_curve, show_report
from offbeat.envs.frozen_lake.rows import conversations, write_rows
from offbeat.services.buffer.config import RedisConfig
from offbeat.services.control.schemas import CountersView
from offbeat.services.keys import RunKeys
from offbeat.services.telemetry import MetricRecord, Partial, RedisMetrics, mean
from offbeat.trainer.learner.evaluation_metrics import evaluation_values
from offbeat.trainer.trackers.metrics_writer import MetricsWriter
from tests.fakes import make_trajectory
from tests.paths import CONFIGS, QUICKSTART

COUNTERS = CountersView(admitted=10, submitted=9, trained=8, dropped={"stale": 1}, failed={"timeout": 1}, in_flight=0)
ISSUE_2 = {
    "success_before",
    "success_after",
    "greedy_before",
    "greedy_after",
    "eval_episodes",
    "wall_s",
    "steps",
    "trajectories",
    "tokens_generated",
    "tokens_trained",
    "weight_updates",
    "max_staleness_seen",
    "groups_admitted",
    "groups_trained",
    "groups_dropped",
    "groups_failed",
    "mismatch_kl",
    "baselines",
    "seed",
}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return load_run(QUICKSTART, [f"output_dir={tmp_path}", "final_val_batch_size=32"])


def records() -> list[MetricRecord]:
    def evaluation(when: str, sampling: str, success: list[float], step: int, time: float) -> MetricRecord:
        labels = {"when": when, "sampling": sampling}
        return MetricRecord(
            "eval", {"success": mean(success), "reward": mean(2 * x for x in success)}, step, labels, time
        )

    def step(number: int) -> MetricRecord:
        values = {
            "success": mean([number / 4]),
            "staleness_max": Partial("max", float(number % 2)),
            "actor/mismatch_kl": Partial("mean", 0.1, 10.0),
            "trajectories": Partial("sum", 64.0),
            "tokens_trained": Partial("sum", 1000.0),
        }
        return MetricRecord("learner", values, number, time=130.0 + number)

    generated = {
        "tokens": Partial("sum", 500.0),
        "weight_updates": Partial("sum", 3.0),
        "prefix_cache_hit_rate": Partial("mean", 300.0, 400.0),
    }
    return [
        MetricRecord("command", {"began": Partial("last", 100.0)}, time=101.0),
        evaluation("before", "sampled", [0.0, 0.0, 1.0, 0.0], 0, 130.0),
        evaluation("before", "greedy", [0.0] * 4, 0, 130.0),
        step(1),
        step(2),
        step(2),
        MetricRecord("generation", generated, time=132.0),
        evaluation("after", "sampled", [1.0, 1.0, 1.0, 0.0], 2, 140.0),
    ]


def history(found: list[MetricRecord]) -> RunHistory:
    made = RunHistory()
    made.add((f"{i}-0", record) for i, record in enumerate(found))
    return made


def test_the_report_summarizes_the_records(config: RunConfig):
    report = build_report(config, history(records()), COUNTERS, baselines={"random": 0.1}, startup_s={}, ended_at=150.0)
    assert set(report) >= ISSUE_2
    assert (report["success_before"], report["success_after"]) == (0.25, 0.75)
    assert (report["greedy_before"], report["greedy_after"]) == (0.0, None)
    assert (report["steps"], report["trajectories"], report["tokens_trained"]) == (2, 128, 2000)
    assert (report["tokens_generated"], report["weight_updates"]) == (500, 3)
    assert report["prefix_cache_hit_rate"] == 0.75
    out = io.StringIO()
    show_report(report, config.output_dir, Console(file=out, width=200))
    assert "500 tokens generated (75% of prompt tokens cached)" in out.getvalue()
    assert report["wall_s"] == 50.0
    assert report["phases_s"] == {"before_training": 30.0, "training": 2.0, "after_training": 18.0}
    assert report["max_staleness_seen"] == 1
    assert report["groups_dropped"] == {"stale": 1}
    assert report["mismatch_kl"] == pytest.approx(0.01)
    assert report["eval_episodes"] == 4


def test_a_run_without_records_has_a_report(config: RunConfig):
    maker = ReportMaker(config, RunHistory())
    maker.draw()
    maker.render()
    report = maker.write(None, ended_at=150.0)
    assert set(report) >= ISSUE_2
    assert report["success_after"] is None
    maker.show(Console(quiet=True))


def test_report_curve_and_rendered_episodes_are_written(config: RunConfig, tmp_path: Path):
    rows = [
        {"tag": "FrozenLake", "seed": 2**31 + i, "reward": 0.0, "metrics": {"success": 0.0}, "text": ["s", "o", "Down"]}
        for i in range(3)
    ]
    (tmp_path / "evaluations").mkdir()
    for name in ("before-sampled-0", "after-sampled-2"):
        (tmp_path / "evaluations" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    maker = ReportMaker(config, history(records()))
    maker.draw()
    maker.render()
    written = maker.write(COUNTERS, ended_at=150.0)
    assert json.loads((tmp_path / "report.json").read_text()) == written
    assert (
        0 <= written["baselines"]["random"] < written["baselines"]["scripted"] <= written["baselines"]["optimal"] <= 1
    )
    for name in ("learning_curve.png", "episodes.gif", "episodes.html"):
        assert (tmp_path / name).stat().st_size > 1000
    console = Console(record=True, width=200)
    maker.show(console)
    shown = console.export_text()
    measured = {cells[1].strip(): cells[2:4] for line in shown.splitlines() if len(cells := line.split("│")) == 5}
    assert [float(cell) for cell in measured["success, sampled"]] == [0.25, 0.75]
    assert [float(cell) for cell in measured["reward, sampled"]] == [0.5, 1.5]
    assert measured["reward, greedy"][1].strip() == "-"
    assert "learning_curve.png" in shown
    assert "failed groups 1 (timeout 1): an episode of each failed at every attempt with its seed" in shown


def test_unmeasured_values_are_null_and_never_nan(config: RunConfig):
    nan = MetricRecord("eval", {"reward": mean([1.0])}, 1, {"when": "during", "sampling": "sampled"}, 135.0)
    report = build_report(config, history([*records(), nan]), None, baselines={}, startup_s={}, ended_at=150.0)
    json.dumps(report, allow_nan=False)
    assert [each["success"] for each in report["evaluations"]].count(None) == 1


def test_a_run_without_readable_records_is_refused_in_one_line(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert remake_report(str(tmp_path)) == 1
    assert "holds no redis/" in capsys.readouterr().err
    elsewhere = config.model_copy(update={"redis": RedisConfig(url="redis://127.0.0.1:1/0")})
    (tmp_path / "config.yaml").write_text(dump_yaml(elsewhere))
    assert remake_report(str(tmp_path)) == 1
    assert "refused" in capsys.readouterr().err
    assert not (tmp_path / "report.json").exists()
    assert not (tmp_path / "redis").exists()


def test_a_rest_run_has_the_attempts_of_its_history(
    config: RunConfig, tmp_path: Path, redis_url: str, capsys: pytest.CaptureFixture[str]
):
    """A run over REST has no records of a command, no redis/ in its folder, and no report yet."""
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    with Redis.from_url(redis_url) as redis:
        assert remake_report(str(tmp_path), redis_url) == 1
        assert f"has no run '{config.exp_name}'" in capsys.readouterr().err
        keys = RunKeys(config.exp_name)
        redis.hset(keys.record, mapping={"started_at": "200.0", "ended_at": "290.0"})
        for at, event in ((100, "created"), (150, "state"), (200, "created"), (290, "state")):
            redis.xadd(keys.history, {"e": event, "d": "{}"}, id=f"{at}000-0")
        metrics = RedisMetrics(redis, config.exp_name)
        for record in records()[1:]:
            metrics.append(record)
        assert remake_report(str(tmp_path), redis_url) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["attempts"], report["wall_s"], report["ended_at"]) == (2, 140.0, 290.0)
    assert (report["success_before"], report["success_after"], report["steps"]) == (0.25, 0.75, 2)
    assert (tmp_path / "learning_curve.png").stat().st_size > 1000


def test_a_report_that_can_not_be_written_is_a_line(
    config: RunConfig, tmp_path: Path, redis_url: str, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    (tmp_path / "report.json").mkdir()
    with Redis.from_url(redis_url) as redis:
        redis.hset(RunKeys(config.exp_name).record, mapping={"started_at": "200.0", "ended_at": "290.0"})
        assert remake_report(str(tmp_path), redis_url) == 1
    assert capsys.readouterr().err.startswith("offbeat: [Errno ")


def test_records_that_redis_has_trimmed_are_read_from_the_folder(config: RunConfig, tmp_path: Path, redis_url: str):
    """All but the last one are trimmed."""
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    nan = MetricRecord("learner", {"loss": Partial("last", float("nan"))}, 3, time=134.0)
    with Redis.from_url(redis_url) as redis:
        redis.hset(RunKeys(config.exp_name).record, mapping={"started_at": "100.0", "ended_at": "150.0"})
        metrics = RedisMetrics(redis, config.exp_name)
        with MetricsWriter(redis, config.exp_name, tmp_path, [], 0):
            for record in [*records()[:-1], nan]:
                metrics.append(record)
        metrics.append(records()[-1])
        redis.xtrim(RunKeys(config.exp_name).metrics, maxlen=1, approximate=False)
        assert remake_report(str(tmp_path), redis_url) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    known = history([*records()[:-1], nan, records()[-1]])
    of_all = build_report(config, known, None, baselines=report["baselines"], startup_s={}, ended_at=150.0)
    assert {name: value for name, value in report.items() if of_all[name] is not None} == {
        name: value for name, value in of_all.items() if value is not None
    }


@pytest.mark.parametrize(
    ("lake", "box"), [("Lake", "Box"), ("openai/gsm8k", "openai/math"), ("lake[hard]", "lake[easy]")]
)
def test_the_table_shows_spread_length_pass_at_k_and_each_tag(config: RunConfig, tmp_path: Path, lake: str, box: str):
    history = RunHistory()
    for when, at in (("before", 0), ("after", 9)):
        played = [
            structs.replace(make_trajectory(0, i, reward=(at + i) / 16), tag=lake if i < 2 else box) for i in range(4)
        ]
        values = evaluation_values(played, 4, step=at, group_size=2)
        labels = {"when": when, "sampling": "sampled"}
        history.add([(f"{at + 1}-0", MetricRecord("eval", values, at, labels, float(at)))])
    report = build_report(config, history, COUNTERS, baselines={}, startup_s={}, ended_at=9.0)
    assert report["evaluations"][1]["metrics"]["reward_max"] == 0.75
    console = Console(record=True, width=120, file=io.StringIO())
    show_report(report, tmp_path, console)
    lines = [line for line in console.export_text().splitlines() if "│" in line]
    shown = {
        cells[0].strip(): [cell.strip() for cell in cells[1:3]]
        for cells in (line.strip("│").split("│") for line in lines)
    }
    assert shown["reward, greatest"] == ["0.188", "0.750"]
    assert shown["reward, least"] == ["0.000", "0.562"]
    assert shown["pass@2"] == ["1.000", "1.000"]
    assert shown["tokens per episode"] == ["4.000", "4.000"]
    assert shown["answers cut short"] == ["0.000", "0.000"]
    assert shown[f"{box}: reward, least"] == ["0.125", "0.688"]
    assert f"{lake}: pass@2" in shown
    assert len({name for name in shown if ": " in name}) == 10


@pytest.mark.parametrize(("pipeline", "is_named"), [("agentic", True), ("online_dpo", True), ("sft", False)])
def test_the_table_names_held_out_tasks_if_there_are_episodes(
    config: RunConfig, tmp_path: Path, pipeline: str, is_named: bool
):
    history = RunHistory()
    labels = {"when": "before", "sampling": "sampled"}
    history.add([("1-0", MetricRecord("eval", {"reward": mean([0.5])}, 0, labels, 1.0))])
    for evaluated, shown in ((history, is_named), (RunHistory(), False)):
        report = build_report(config, evaluated, None, baselines={}, startup_s={}, ended_at=1.0)
        out = io.StringIO()
        show_report({**report, "pipeline": pipeline}, tmp_path, Console(file=out, width=120))
        assert ("on held-out tasks" in out.getvalue()) is shown
        is_told = "0 steps, 0 s, without an evaluation" in out.getvalue()
        assert is_told is (evaluated is not history and is_named)


def test_a_data_pipelines_report_shows_its_losses(tmp_path: Path):
    write_rows(tmp_path / "rows.jsonl", conversations(4))
    rows = [f"data.{name}={tmp_path / 'rows.jsonl'}" for name in ("dataset_name", "val_dataset_name")]
    config = load_run(CONFIGS / "sft.yaml", [f"output_dir={tmp_path}", *rows])
    history = RunHistory()
    steps = [MetricRecord("learner", {"loss": mean([3.0 / n])}, n, time=130.0 + n) for n in (1, 2, 3)]
    labels = [{"when": when, "sampling": "loss"} for when in ("before", "after")]
    losses = [MetricRecord("eval", {"loss": mean([2.5 - n])}, 3 * n, labels[n], 130.0 + 4 * n) for n in (0, 1)]
    history.add((f"{n}-0", record) for n, record in enumerate([*records()[:1], losses[0], *steps, losses[1]]))
    report = build_report(config, history, None, baselines={}, startup_s={}, ended_at=140.0)
    assert report["training_loss"] == {"before": pytest.approx(11 / 6), "after": pytest.approx(11 / 6)}
    out = io.StringIO()
    show_report(report, tmp_path, Console(file=out, width=120))
    assert "held-out tasks" not in out.getvalue()
    assert "new pairs" not in out.getvalue()
    sampled = io.StringIO()
    show_report({**report, "tokens_generated": 7}, tmp_path, Console(file=sampled, width=120))
    assert "7 tokens generated, 0 trained, 0 weight updates\n" in sampled.getvalue()
    online = io.StringIO()
    show_report({**report, "pipeline": "online_dpo"}, tmp_path, Console(file=online, width=120))
    assert "loss of new pairs" in online.getvalue()
    assert "training rows" not in online.getvalue()
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "loss" in line]
    assert table == [
        ["loss of training rows", "1.8333", "1.8333"],
        ["loss of validation rows", "2.5000", "1.5000"],
    ]


def test_the_curve_of_online_dpo_is_of_its_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its steps have a loss, too, which its evaluations do not."""
    config = load_run(CONFIGS / "recipes/online_dpo.yaml", [f"output_dir={tmp_path}"])
    found = records()
    losses = [
        MetricRecord("learner", {**each.values, "loss": mean([0.7])}, each.step, time=each.time) for each in found
    ]
    drawn: dict[str, Any] = {}
    monkeypatch.setattr("offbeat.deploy.report.report.draw_learning_curve", lambda _, **parts: drawn.update(parts))
    known = history([loss if each.source == "learner" else each for each, loss in zip(found, losses, strict=True)])
    draw_curve(tmp_path / "learning_curve.png", config, known, {"random": 0.1})
    assert (drawn["metric"], drawn["baselines"]) == ("success", {"random": 0.1})
    assert [point.success for point in drawn["evaluations"]] == [0.25, 0.75]
    assert [point.success for point in drawn["rollout"]] == [0.25, 0.5]


def test_a_report_is_made_again_of_a_run_without_envs(tmp_path: Path, redis_url: str):
    write_rows(tmp_path / "rows.jsonl", conversations(4))
    rows = [f"data.{name}={tmp_path / 'rows.jsonl'}" for name in ("dataset_name", "val_dataset_name")]
    config = load_run(CONFIGS / "sft.yaml", [f"output_dir={tmp_path}", *rows])
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    with Redis.from_url(redis_url) as redis:
        redis.hset(RunKeys(config.exp_name).record, mapping={"started_at": "100.0", "ended_at": "200.0"})
        RedisMetrics(redis, config.exp_name).append(MetricRecord("learner", {"loss": mean([3.0])}, 1, time=130.0))
        assert remake_report(str(tmp_path), redis_url) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["steps"], report["training_loss"]) == (1, {"before": 3.0, "after": 3.0})
    assert (tmp_path / "learning_curve.png").is_file()
