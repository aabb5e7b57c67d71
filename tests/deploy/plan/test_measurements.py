"""Measures of runs whose truth is known."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from offbeat.deploy.config.loader import load_run
from offbeat.deploy.plan.measurements import (
    PlanError,
    intraclass_correlation_of,
    mean_reporting,
    measure,
    read_batches,
    read_measures,
)
from offbeat.deploy.plan.metric_rows import MetricRow, read_rows
from offbeat.deploy.plan.workload import MeasuredWorkload
from offbeat.services.messages.types import Trajectory
from offbeat.services.telemetry import MetricRecord, Partial
from offbeat.trainer.trackers.metrics_file import METRICS_FILE, MetricsFile
from tests.copying import replace
from tests.deploy.console.folders import write_run
from tests.fakes import make_trajectory
from tests.memory import measure_memory
from tests.paths import QUICKSTART

ENV_S, FIXED_S, SLOPE_S = 0.06, 0.01, 0.002


def step_rows(num: int = 6, *, refilled: float = 0.0) -> list[MetricRow]:
    """Steps of 2 s that train for 0.1 s and 1 ms per token, of 100 to 200 tokens each."""
    rows: list[MetricRow] = []
    for step in range(1, num + 1):
        tokens = 100.0 + 20 * step
        values = {
            "time/step_s": 1.9,
            "time/wait_s": 1.0,
            "time/train_s": 0.1 + 0.001 * tokens,
            "time/publish_s": 0.02,
            "tokens/computed": tokens,
            "trajectories": 10.0,
            "groups": 5.0,
            "groups_dropped/no_signal": refilled,
            "groups_without_signal": 2.0,
            "staleness": 1.5,
        }
        rows.append(MetricRow(2.0 * step, "learner", values, step))
    return rows


def rollout_rows(counts: Sequence[int] = (4, 8, 16, 32), episode_s: float = 1.0) -> list[MetricRow]:
    """A second each after the first step, with `counts` turns in generation and the episodes in play that lead to that."""
    rows: list[MetricRow] = []
    for second, count in enumerate(counts, start=3):
        turn_s = FIXED_S + SLOPE_S * count
        playing = count * (turn_s + ENV_S) / turn_s
        rows.append(MetricRow(second + 0.5, "rollout", {"playing": playing}, labels={"worker": "w"}))
        values = {"turns": 40.0, "generation_s": turn_s, "env_s": ENV_S, "episodes": 10.0, "episode_s": episode_s}
        rows.append(MetricRow(second + 0.6, "rollout", values, labels={"worker": "w", "kind": "train"}))
        values = {"turns": 5.0, "generation_s": 9.0, "env_s": 9.0, "episodes": 1.0, "episode_s": 99.0}
        rows.append(MetricRow(second + 0.7, "rollout", values, labels={"worker": "w", "kind": "eval"}))
    return rows


def timed(index: int, duration_s: float, num_turns: int = 2) -> Trajectory:
    return replace(make_trajectory(0, index, num_turns=num_turns), duration_s=duration_s)


def test_training_is_a_line_over_tokens_and_the_rest_of_a_step_is_counted():
    measures = measure([*step_rows(refilled=1.0), *rollout_rows()], []).measures
    assert measures.train_fixed_s == pytest.approx(0.1)
    assert measures.train_per_token_s == pytest.approx(0.001)
    assert measures.tokens == pytest.approx(18.0)  # of the five steps after the first
    assert measures.train_s(10) == pytest.approx(0.28)
    assert measures.publish_s == pytest.approx(0.02)
    assert measures.other_s == pytest.approx(2 - 1 - 0.28 - 0.02)
    assert measures.no_signal == pytest.approx([(1 + 2) / (1 + 5)] * 5)


def test_what_the_run_achieved_is_kept_for_comparison():
    measured = measure([*step_rows(), *rollout_rows()], [])
    assert measured.trajectories_per_s == pytest.approx(5.0)
    assert measured.step_s == pytest.approx(2.0)
    assert (measured.lag, measured.learner_idle) == (pytest.approx(1.5), pytest.approx(0.5))


@pytest.mark.parametrize("gap_s", [10.0, 28_800.0])
def test_a_pause_between_steps_is_left_out(gap_s: float):
    steps = step_rows(40)
    paused = [replace(row, time=row.time + gap_s * (row.time > 41.0)) for row in steps]
    whole, interrupted = measure([*steps, *rollout_rows()], []), measure([*paused, *rollout_rows()], [])
    assert interrupted.measures.other_s == pytest.approx(whole.measures.other_s, rel=0.05)
    assert interrupted.trajectories_per_s == pytest.approx(5.0)
    assert (interrupted.step_s, interrupted.learner_idle) == (pytest.approx(2.0), pytest.approx(0.5))
    assert interrupted.num_steps == 38
    (note,) = {*interrupted.notes} - {*whole.notes}
    assert note == f"left out for a pause, a failure or an evaluation: 1 of 39 steps, {gap_s + 2:.0f} s"


def test_a_turn_takes_longer_beside_others_and_evaluations_are_left_out():
    times = measure([*step_rows(), *rollout_rows()], []).measures.turn_s
    for count in (4, 32, 64):
        assert times.seconds(count) == pytest.approx(FIXED_S + SLOPE_S * count)


def test_noise_of_a_turn_is_no_effect_of_concurrency():
    """Each time is 30% off, in either direction, at the same number of episodes in play."""
    rows = rollout_rows((16,) * 40 + (17,) * 40)
    for number, row in enumerate(rows):
        noise = 1.3 if number // 3 % 2 else 0.7
        if "generation_s" in row.values:
            rows[number] = replace(row, values={**row.values, "generation_s": 0.04 * noise})
    times = measure([*step_rows(), *rows], []).measures.turn_s
    assert times.seconds(32) == pytest.approx(0.04, rel=0.02)


def test_equal_turns_do_not_depend_on_concurrency():
    rows = [replace(row, values={**row.values, "generation_s": 0.03}) for row in rollout_rows()]
    times = measure([*step_rows(), *rows], []).measures.turn_s
    assert times.is_flat
    assert times.seconds(1) == pytest.approx(0.03)


def test_intraclass_correlation_is_that_of_the_logarithms():
    """Logarithms 0, 2 and 4, 6: mean squares 16 between groups and 2 within; ragged ones by Shrout and Fleiss' size."""
    groups = [[timed(0, 1.0), timed(1, np.exp(2.0))], [timed(0, np.exp(4.0)), timed(1, np.exp(6.0))]]
    assert intraclass_correlation_of(groups) == pytest.approx((16 - 2) / (16 + 2))
    ragged = [[timed(i, np.exp(x)) for i, x in enumerate((0.0, 2.0))], [timed(i, np.exp(4.0 + i)) for i in range(3)]]
    between, within, size = 2 * 2.4**2 + 3 * 1.6**2, (2 + 2) / 3, 5 - 13 / 5
    assert intraclass_correlation_of(ragged) == pytest.approx((between - within) / (between + (size - 1) * within))


def test_intraclass_correlation_of_independent_and_of_equal_siblings():
    rng = np.random.default_rng(0)
    independent = [[timed(i, float(rng.lognormal())) for i in range(8)] for _ in range(100)]
    assert intraclass_correlation_of(independent) < 0.05
    equal = [[timed(i, float(number + 1)) for i in range(3)] for number in range(4)]
    assert intraclass_correlation_of(equal) == 1.0
    assert intraclass_correlation_of([[timed(0, 1.0)] * 2] * 3) == 1.0
    assert intraclass_correlation_of([]) == intraclass_correlation_of([[timed(0, 1.0)], [timed(0, 2.0)]]) == 1.0


def test_recorded_groups_are_weighted_to_the_mean_of_all_episodes():
    """Quick groups carry no signal more often, and are then not recorded."""
    rows = [replace(row, values={**row.values, "generation_s": 0.1}) for row in rollout_rows(episode_s=1.2)]
    groups = [[timed(0, 1.0), timed(1, 1.0)], [timed(0, 2.0), timed(1, 3.0, num_turns=4)]]
    workload = measure([*step_rows(), *rows], groups).measures.workload
    assert isinstance(workload, MeasuredWorkload)
    assert [episode.turns for episode in workload.groups[1]] == [2, 4]
    assert [episode.env_s for episode in workload.groups[1]] == pytest.approx([2.0 - 2 * 0.1, 3.0 - 4 * 0.1])
    assert np.dot(workload.weights, [1.0, 2.5]) == pytest.approx(1.2)


def test_without_recorded_batches_episodes_are_alike_and_a_note_says_so():
    measured = measure([*step_rows(), *rollout_rows(episode_s=2.0)], [])
    drawn = measured.measures.workload.draw_groups(np.random.default_rng(0), 1, 1)
    assert drawn.turns.item() == 4
    assert "no batches are recorded" in measured.notes[0]


def test_cpu_of_workers_is_a_line_over_all_turns_and_no_time_of_envs():
    """Reports of .05 s and 20 ms a turn, evaluations included; a worker starts before the first step ends."""
    rows = [replace(row, values={**row.values, "generation_s": 0.1}) for row in rollout_rows(episode_s=1.2)]
    cpu = [MetricRow(1.0, "rollout", {"cpu_s": 50.0}, labels={"worker": "w"})]
    for second, idle in enumerate((0.0, 10.0, 20.0, 30.0), start=3):  # the worker v samples less
        labels = {"worker": "v", "kind": "train"}
        cpu += [
            MetricRow(second + 0.8, "rollout", {"cpu_s": 0.05 + 0.02 * 45}, labels={"worker": "w"}),
            MetricRow(second + 0.5, "rollout", {"turns": 45 - idle, "generation_s": 0.1}, labels=labels),
            MetricRow(second + 0.9, "rollout", {"cpu_s": 0.05 + 0.02 * (45 - idle)}, labels={"worker": "v"}),
        ]
    measures = measure([*step_rows(), *rows, *cpu], [[timed(0, 1.2), timed(1, 1.2)]]).measures
    assert measures.worker_s == pytest.approx(0.02)
    drawn = measures.workload.draw_groups(np.random.default_rng(0), 1, 1)
    assert drawn.env_s.item() == pytest.approx(1.2 - 2 * (0.1 + 0.02))
    assert measure([*step_rows(), *rows], []).measures.worker_s == 0.0


def test_waits_for_a_free_thread_are_no_time_of_an_envs_call():
    """40 turns and 10 resets each second, of .06 s with waits; evaluation has 5 turns of its own."""
    rows, groups = (
        [replace(row, values={**row.values, "generation_s": 0.1}) for row in rollout_rows()],
        [[timed(0, 2.0)]],
    )
    unlimited, free, full = (
        measure([*step_rows(), *rows], groups, env_steps=limit).measures for limit in (None, 64, 2)
    )
    env_s = [each.workload.draw_groups(np.random.default_rng(0), 1, 1).env_s.item() for each in (unlimited, free, full)]
    assert (unlimited.env_call_s, free.env_call_s) == (None, pytest.approx(0.06 * 50 / 40))
    assert env_s[0] == env_s[1] == pytest.approx(2.0 - 2 * 0.1)
    rate = 4 * 45 / 3.2
    assert full.env_call_s == pytest.approx(2 / rate)
    assert env_s[2] == pytest.approx(env_s[0] - 2 * (0.06 * 50 / 40 - 2 / rate))


@pytest.mark.parametrize(
    ("rows", "complaint"), [(step_rows(2), "2 steps"), (step_rows(), "no finished episode"), ([], "0 steps")]
)
def test_a_run_without_steps_or_episodes_is_refused(rows: list[MetricRow], complaint: str):
    with pytest.raises(PlanError, match=complaint):
        measure(rows, [], where="the folder")


def test_a_run_folder_gives_metrics_and_batches(tmp_path: Path):
    folder = write_run(tmp_path / "lake")
    config = load_run(QUICKSTART, [f"output_dir={folder}"])
    batches, notes = read_batches(folder, config)
    assert [len(batch.groups) for batch in batches] == [1, 1]
    assert not notes
    with pytest.raises(PlanError, match="0 steps"):  # of a writer that times nothing
        read_measures(folder, config)
    file = MetricsFile(folder / METRICS_FILE)
    for number, row in enumerate([*step_rows(), *rollout_rows()]):
        values = {name: Partial("last", value) for name, value in row.values.items()}
        file.write(f"{10**13 + number}-0", MetricRecord(row.source, values, row.step, dict(row.labels), row.time))
    file.write(f"{10**14}-0", MetricRecord("generation", {"load_s": Partial("last", float("nan"))}))
    file.flush()
    with (folder / METRICS_FILE).open("a") as half:
        half.write('{"time": 3.0, "sour')
    assert read_measures(folder, config).num_episodes == 6
    assert len(list(read_rows(folder / METRICS_FILE))) >= 18


def test_of_a_long_run_the_newest_metrics_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_run(tmp_path / "lake")
    config = load_run(QUICKSTART, [f"output_dir={folder}"])
    file = MetricsFile(folder / METRICS_FILE)
    old = [MetricRecord("generation", {"load_s": Partial("last", 1e6)}, time=0.0)] * 500
    new = [
        MetricRecord(
            row.source, {n: Partial("last", v) for n, v in row.values.items()}, row.step, dict(row.labels), row.time
        )
        for row in [*step_rows(), *rollout_rows()]
    ]
    size = 0
    for number, record in enumerate([*old, *new]):
        if record is new[0]:
            file.flush()
            size = (folder / METRICS_FILE).stat().st_size
        file.write(f"{10**13 + number}-0", record)
    file.flush()
    assert read_measures(folder, config).measures.serve_s > 1e5
    newest = (folder / METRICS_FILE).stat().st_size - size
    monkeypatch.setattr("offbeat.deploy.plan.measurements.NEWEST_BYTES", newest + 10)
    measured = read_measures(folder, config)
    assert measured.measures.serve_s == 0
    assert "measured over the newest" in measured.notes[0]


def test_of_the_records_of_a_long_run_only_what_is_measured_is_held(tmp_path: Path):
    """A day of eight workers has 1.4 million records."""
    file = MetricsFile(tmp_path / METRICS_FILE)
    others = {f"env/metric_{i}": Partial("mean", 0.1 * i) for i in range(40)}
    for number, row in enumerate([*step_rows(), *rollout_rows(counts=[4, 8] * 1000)], start=1):
        values = others | {name: Partial("last", value) for name, value in row.values.items()}
        file.write(f"{number}-0", MetricRecord(row.source, values, row.step, dict(row.labels), row.time))
    file.close()
    rows = list(read_rows(tmp_path / METRICS_FILE))
    assert len(rows) == 6006
    assert measure_memory(lambda: list(read_rows(tmp_path / METRICS_FILE)))[0] < 700 * len(rows)
    assert (
        measure(rows, []).measures.turn_s == measure([*step_rows(), *rollout_rows([4, 8] * 1000)], []).measures.turn_s
    )


def test_engines_that_were_added_while_the_run_trained_are_counted_as_they_reported():
    """One engine and four have the same turns at once each; the configuration says one, as it began."""
    few, many = rollout_rows((4, 8, 16, 32)), rollout_rows((4, 8, 16, 32))
    many = [replace(row, time=row.time + 10.0) for row in many]
    many = [
        replace(row, values={**row.values, "playing": 4 * row.values["playing"]}) if "playing" in row.values else row
        for row in many
    ]
    engines = [(2.5 + second, name) for second in range(10) for name in ("a",)]
    engines += [(12.5 + second, name) for second in range(10) for name in "abcd"]
    reports = [MetricRow(time, "generation", {}, labels={"replica": name}) for time, name in engines]
    alone = measure([*step_rows(), *few], []).measures.turn_s
    both = measure([*step_rows(), *few, *many, *reports], [], num_replicas=1).measures.turn_s
    assert both.seconds(8.0) == pytest.approx(alone.seconds(8.0))
    assert both.seconds(32.0) == pytest.approx(alone.seconds(32.0))


def test_the_threads_of_workers_that_were_added_are_counted():
    reports = [MetricRow(3.5 + second, "rollout", {}, labels={"worker": name}) for second in range(9) for name in "ab"]
    assert mean_reporting(reports, "rollout", "worker", default=1) == pytest.approx(2.0)
    assert mean_reporting([], "rollout", "worker", default=3) == 3


def test_a_folder_without_metrics_is_refused(tmp_path: Path):
    with pytest.raises(PlanError, match=r"metrics\.jsonl can't be read"):
        read_measures(tmp_path, load_run(QUICKSTART, []))


def test_what_began_before_the_first_step_ended_is_left_out():
    """An engine compiles its kernels during the first turns."""
    rows = [*step_rows(), *(replace(row, time=row.time + 20.0) for row in rollout_rows())]
    cold = {"turns": 900.0, "generation_s": 4.0, "env_s": 0.0, "episodes": 80.0, "episode_s": 25.0}
    cold_rows = [MetricRow(time, "rollout", cold, labels={"worker": "w", "kind": "train"}) for time in (1.0, 20.1)]
    groups = [[timed(i, 1.0) for i in range(2)]]
    assert measure([*rows, *cold_rows], groups).measures == measure(rows, groups).measures
    assert measure([*step_rows(), *cold_rows], groups).measures.turn_s.seconds(1.0) == pytest.approx(4.0)
