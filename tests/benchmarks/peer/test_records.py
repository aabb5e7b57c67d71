"""Reading what both sides wrote, and comparing it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.benchmarks.harness.result import mean_interval
from offbeat.benchmarks.peer.comparison import PeerBench, common_target, compare
from offbeat.benchmarks.peer.cpu_meter import CPU, CpuMeter, kind_of
from offbeat.benchmarks.peer.done import MeasuredWith, read_done
from offbeat.benchmarks.peer.options import PeerError, PeerOptions, parse
from offbeat.benchmarks.peer.records import (
    PeerStep,
    PolicySnapshot,
    SideRun,
    read_offbeat,
    read_trl,
)
from offbeat.benchmarks.peer.settings import (
    SETTINGS,
    offbeat_config,
    play_rules,
    train_job,
    with_overrides,
)
from offbeat.benchmarks.peer.trl_worker import job as jobs
from offbeat.benchmarks.peer.venv import TRL_VENV
from offbeat.deploy.config.errors import ConfigError
from tests.waiting import wait_until_sync


def write_lines(path: Path, records: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")


def side(step_s: float, successes: list[float]) -> SideRun:
    """A run of 20 steps with a snapshot each 5."""
    steps = tuple(PeerStep(n, n * step_s, 0.5) for n in range(1, 21))
    snapshots = tuple(PolicySnapshot(5 * i, 5 * i * step_s, Path(f"{i}")) for i in range(5))
    return SideRun(3.0, steps, snapshots).with_successes(successes)


def test_a_success_between_two_snapshots_is_reached_in_between() -> None:
    run = side(2.0, [0.1, 0.3, 0.5, 0.9, 0.95])
    assert run.seconds_to(0.4) == pytest.approx(15.0)
    assert run.seconds_to(0.1) == 0.0
    assert run.seconds_to(0.96) is None


def test_rates_leave_out_the_first_steps() -> None:
    steps = (
        *(PeerStep(n, 100.0 * n, 0.0) for n in range(1, 7)),
        *(PeerStep(6 + n, 600.0 + 0.5 * n, 0.0) for n in range(1, 9)),
    )
    run = SideRun(0.0, steps, ())
    assert run.rate(64) == pytest.approx(64 / 0.5)
    assert run.step_s() == pytest.approx(0.5)


def test_the_sides_are_compared_at_the_highest_success_that_all_reach() -> None:
    ours, theirs = side(1.0, [0.1, 0.4, 0.8, 0.96, 0.97]), side(4.0, [0.1, 0.4, 0.8, 0.92, 0.91])
    assert common_target([ours, theirs]) == 0.9
    result = compare({"offbeat": {1: ours}, "trl": {1: theirs}}, 64)
    assert result["rate_ratio"] == pytest.approx(4.0)
    assert result["speedup_to_target"] == pytest.approx((40 + 20 * (0.9 - 0.8) / 0.12) / (10 + 5 * (0.9 - 0.8) / 0.16))


def test_each_seed_is_compared_at_its_own_success() -> None:
    ours = {1: side(1.0, [0.1, 0.5, 0.9, 0.9, 0.9]), 2: side(1.0, [0.1, 0.2, 0.2, 0.2, 0.2]), 3: side(1.0, [0.0] * 5)}
    theirs = {1: side(3.0, [0.1, 0.5, 0.9, 0.9, 0.9]), 2: side(5.0, [0.1, 0.2, 0.3, 0.3, 0.3]), 3: side(5.0, [0.9] * 5)}
    result = compare({"offbeat": ours, "trl": theirs}, 64)
    assert [run["target_success"] for run in result["sides"]["trl"]["runs"]] == [0.9, 0.2, None]
    assert result["speedup_to_target"] == pytest.approx((3 + 5) / 2)


def test_target_is_none_without_a_common_success() -> None:
    assert common_target([side(1.0, [0.0] * 5), side(1.0, [0.9] * 5)]) is None
    assert "speedup_to_target" not in compare(
        {"offbeat": {1: side(1.0, [0.0] * 5)}, "trl": {1: side(1.0, [0.9] * 5)}}, 8
    )


def test_offbeats_time_counts_from_the_report_of_its_first_weights(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [
        {"time": 101.5, "source": "command", "step": None, "values": {"began": 100.0}},
        {"time": 120.0, "source": "generation", "step": None, "values": {"weight_updates": 0.0}},
        {"time": 131.0, "source": "generation", "step": None, "values": {"weight_updates": 1.0}},
        {"time": 132.5, "source": "learner", "step": 1, "values": {"success": 0.25}},
        {"time": 133.0, "source": "learner", "step": None, "values": {}},
        {"time": 134.0, "source": "learner", "step": 2, "values": {"success": 0.5}},
    ]
    write_lines(tmp_path / "metrics.jsonl", records)
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    run = read_offbeat(tmp_path, Path("start"))
    assert run.startup_s == 30.0
    assert [(step.step, step.seconds, step.success) for step in run.steps] == [(1, 2.5, 0.25), (2, 4.0, 0.5)]
    assert [(snapshot.step, snapshot.seconds) for snapshot in run.snapshots] == [(0, 0.0), (2, 4.0)]


def test_mean_success_is_the_area_under_the_curve() -> None:
    run = side(2.0, [0.1, 0.3, 0.5, 0.9, 0.9])  # at 0, 10, 20, 30, 40 s
    assert run.mean_success(40.0) == pytest.approx((0.2 + 0.4 + 0.7 + 0.9) / 4)
    assert run.mean_success(25.0) == pytest.approx((10 * 0.2 + 10 * 0.4 + 5 * 0.6) / 25)
    assert run.mean_success(10.0) == pytest.approx(0.2)
    assert run.mean_success(41.0) is None


def test_before_its_first_policy_a_run_succeeds_never() -> None:
    run = side(2.0, [0.1, 0.3, 0.5, 0.9, 0.9]).from_command()  # the policy is there after 3 s
    assert run.mean_success(13.0) == pytest.approx(10 * 0.2 / 13)
    assert run.seconds_to(0.3) == pytest.approx(13.0)
    assert [step.seconds for step in run.steps[:2]] == [5.0, 7.0]


def test_sides_are_compared_by_mean_success_to_the_end_of_the_shortest_run() -> None:
    ours = {1: side(1.0, [0.0, 0.5, 1.0, 1.0, 1.0]), 2: side(1.0, [0.0, 0.5, 0.5, 0.5, 0.5])}
    theirs = {1: side(2.0, [0.0, 0.5, 1.0, 1.0, 1.0]), 2: side(2.0, [0.0, 0.5, 0.5, 0.5, 0.5])}
    result = compare({"offbeat": ours, "trl": theirs}, 64)
    assert result["horizon_s"] == 20.0
    assert [run["mean_success"] for run in result["sides"]["offbeat"]["runs"]] == pytest.approx([0.75, 0.4375])
    assert [run["mean_success"] for run in result["sides"]["trl"]["runs"]] == pytest.approx([0.5, 0.375])
    difference = result["mean_success_difference"]
    assert difference["mean"] == pytest.approx(0.15625)
    assert difference["high"] - difference["mean"] == pytest.approx(12.706 * 0.09375, rel=1e-4)
    assert difference["mean"] - difference["low"] == pytest.approx(12.706 * 0.09375, rel=1e-4)


def test_one_seed_has_no_interval_and_runs_without_evaluations_no_mean() -> None:
    result = compare({"offbeat": {1: side(1.0, [0.5] * 5)}, "trl": {1: side(1.0, [0.5] * 5)}}, 64)
    assert result["sides"]["trl"]["runs"][0]["mean_success"] == 0.5
    assert "mean_success_difference" not in result
    bare = SideRun(0.0, side(1.0, [0.5] * 5).steps, ())
    result = compare({"offbeat": {1: bare, 2: bare}, "trl": {1: bare, 2: bare}}, 64)
    assert result["horizon_s"] is None
    assert "mean_success_difference" not in result


def test_a_target_replaces_the_highest_common_success() -> None:
    ours, theirs = side(1.0, [0.1, 0.4, 0.8, 0.96, 0.97]), side(4.0, [0.1, 0.4, 0.8, 0.82, 0.81])
    result = compare({"offbeat": {1: ours}, "trl": {1: theirs}}, 64, target=0.85)
    assert result["sides"]["trl"]["runs"][0]["seconds_to_target"] is None
    assert result["sides"]["offbeat"]["runs"][0]["seconds_to_target"] == pytest.approx(10 + 5 * 0.05 / 0.16)
    assert "speedup_to_target" not in result


def test_mean_interval_is_students() -> None:
    interval = mean_interval([1.0, 2.0, 3.0])
    assert (interval.mean, interval.high - 2.0, 2.0 - interval.low) == pytest.approx((2.0, 2.4841, 2.4841), rel=1e-4)


def test_trls_snapshots_stand_at_their_steps_time(tmp_path: Path) -> None:
    records: list[dict[str, object]] = [
        {"startup_s": 9.0},
        {"step": 1, "time": 61.5, "seconds": 1.5, "success": 0.1},
        {"step": 2, "time": 62.5, "seconds": 2.5, "success": 0.2},
    ]
    write_lines(tmp_path / "steps.jsonl", records)
    for step in (0, 2):
        (tmp_path / "snapshots" / f"step-{step:06d}").mkdir(parents=True)
    run = read_trl(tmp_path)
    assert [(snapshot.step, snapshot.seconds) for snapshot in run.snapshots] == [(0, 0.0), (2, 2.5)]


@pytest.mark.parametrize("name", ["a", "b"])
def test_trls_job_is_offbeats_configuration(name: str, folder: Path, tmp_path: Path) -> None:
    setting = SETTINGS[name]
    config = offbeat_config(setting, 7, 10, folder, tmp_path / "run")
    job = train_job(setting, config, tmp_path, threads=2, max_seconds=9.0, together=False)
    assert len(job.task_seeds) == 10 * config.rollout_batch_size // config.train_env_manager.group_size
    assert len(set(job.task_seeds)) == len(job.task_seeds)
    assert job.learning_rate == config.actor_train.training_args.learning_rate
    assert job.groups_per_step * job.group_size == config.rollout_batch_size
    assert job.play.env_config == config.custom_envs["FrozenLake"].env_config
    jobs.write(tmp_path / "job.json", job)
    assert jobs.read(tmp_path / "job.json") == job


def test_neither_side_evaluates_or_warms_up_within_its_time(folder: Path, tmp_path: Path) -> None:
    config = offbeat_config(SETTINGS["b"], 1, 10, folder, tmp_path / "run")
    assert config.eval_steps == 0
    assert config.warm_start is None
    assert play_rules(config, 4).max_turns == config.custom_envs["FrozenLake"].max_steps


def test_from_the_command_offbeat_warm_starts_in_its_run(folder: Path, tmp_path: Path) -> None:
    config = offbeat_config(SETTINGS["d"], 1, 10, folder, tmp_path / "run")
    assert config.warm_start is not None
    assert config.pretrain == "tiny"
    guest = offbeat_config(replace(SETTINGS["d"], from_command=False), 1, 10, folder, tmp_path / "run")
    assert guest.warm_start is None
    assert guest.pretrain == str(folder)


def test_command_line_overrides_the_setting(folder: Path, tmp_path: Path) -> None:
    setting = with_overrides(SETTINGS["b"], ["max_staleness=1", "rollout.coalesce_s=0.02"])
    config = offbeat_config(setting, 1, 10, folder, tmp_path / "run")
    assert (config.max_staleness, config.rollout.coalesce_s, config.rollout.num_threads) == (1, 0.02, 256)
    with pytest.raises(ConfigError, match="max_staleness"):
        offbeat_config(with_overrides(SETTINGS["b"], ["max_stalenes=1"]), 1, 10, folder, tmp_path / "run")


def test_invalid_options_are_named() -> None:
    words = {"settings": "a,c", "seeds": "1, 5", "sides": "trl", "venv": None}
    assert parse(**words) == PeerOptions(settings=("a", "c"), seeds=(1, 5), sides=("trl",), venv=parse(**words).venv)
    with pytest.raises(PeerError, match="there is no 'e', there is a, b, c, d"):
        parse(**{**words, "settings": "a,e"})
    with pytest.raises(PeerError, match="'x' is no whole number"):
        parse(**{**words, "seeds": "1,x"})


def test_a_venv_counts_once_its_pins_are_written_down(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert TRL_VENV.python_of(tmp_path) is None
    (tmp_path / TRL_VENV.marker).write_text("trl==0.1\n", encoding="utf-8")
    assert TRL_VENV.python_of(tmp_path) is None
    (tmp_path / TRL_VENV.marker).write_text("\n".join(TRL_VENV.pins), encoding="utf-8")
    assert TRL_VENV.python_of(tmp_path) == tmp_path / "bin" / "python"


def test_cpu_time_counts_between_the_steps_that_the_rates_count() -> None:
    steps = tuple(PeerStep(n, float(n), 0.0, 100.0 + n) for n in range(1, 17))
    used = tuple((100.0 + t, 7.0 + 1.5 * t) for t in range(0, 40, 3))
    assert SideRun(0.0, steps, (), used).step_cpu_s() == pytest.approx(1.5)
    assert SideRun(0.0, steps, ()).step_cpu_s() is None
    by_kind = {
        "cheap": tuple(0.5 * c for _, c in used),
        "dear": tuple(2.0 * c for _, c in used),
        "idle": (1.0,) * len(used),
    }
    assert list(SideRun(0.0, steps, (), used, by_kind).step_cpu_s_by_kind().items()) == [
        ("dear", pytest.approx(3.0)), ("cheap", pytest.approx(0.75)),
    ]  # fmt: skip


def test_meter_includes_children(tmp_path: Path) -> None:
    # 0.6 for 0.5: the kernel counts hundredths, rounded down
    work = "import time\nwhile time.process_time() < 0.6: pass\ntime.sleep(60)"
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', sys.argv[1]])"
    process = subprocess.Popen([sys.executable, "-S", "-c", parent, work], start_new_session=True)
    try:
        meter = CpuMeter(process.pid, tmp_path / CPU)
        wait_until_sync(lambda: last_cpu(tmp_path / CPU) >= 0.5, timeout_s=60)
        meter.stop()
        assert last_cpu(tmp_path / CPU) < 2.0
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_cpu(path: Path) -> float:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return json.loads(lines[-1])["cpu_s"] if lines else 0.0


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["ray::ServeReplica:generation-peer-b-1:generation", "", ""], "ray::ServeReplica:generation"),
        (["ray::EnvWorkerActor.run"], "ray::EnvWorkerActor"),
        (["VLLM::EngineCore", ""], "VLLM::EngineCore"),
        (["/venv/bin/redis-server 127.0.0.1:6379", "", ""], "redis-server"),
        (["/usr/bin/python", "-B", "-m", "offbeat.trainer.cli", "peer-b-1"], "offbeat.trainer.cli"),
        (["/usr/bin/python", "/venv/ray/dashboard/agent.py", "--port=1"], "agent.py"),
        ([], "other"),
    ],
)
def test_a_process_is_known_by_its_command_line(command: list[str], kind: str) -> None:
    assert kind_of(command) == kind


@pytest.mark.parametrize(
    ("stored", "was"),
    [
        ((120, ()), "--steps 120,"),
        ((20, ("lr=1",)), "--steps 20 --set lr=1,"),
        (None, "unknown steps and --set,"),
    ],
)
def test_a_run_with_other_steps_or_overrides_is_not_taken_for_the_one_asked_for(
    tmp_path: Path, stored: tuple[int, tuple[str, ...]] | None, was: str
) -> None:
    folder = tmp_path / "a-1" / "offbeat"
    folder.mkdir(parents=True)
    (folder / "done").touch()  # as it was before it said with what
    if stored is not None:
        MeasuredWith.now(*stored).write(folder)
    options = parse(settings="a", seeds="1", sides="offbeat", venv=tmp_path, steps=20, folder=tmp_path)
    with pytest.raises(PeerError, match=f"a-1/offbeat holds a run with {was} not --steps 20: --fresh"):
        PeerBench(options, print).measure(SETTINGS["a"], 1, "offbeat")


def test_a_reused_run_says_with_what_it_was_measured(tmp_path: Path) -> None:
    assert read_done(tmp_path, 20, ()) is None
    done = MeasuredWith.now(20, ("lr=1",))
    done.write(tmp_path)
    assert read_done(tmp_path, 20, ("lr=1",)) == done
    assert not replace(done, build="0.1.0 abcdef01").is_of_now
    run = replace(side(1.0, [0.1, 0.4, 0.8, 0.96, 0.97]), measured=done)
    (shown,) = compare({"offbeat": {1: run}}, 64)["sides"]["offbeat"]["runs"]
    assert shown["measured"]["steps"] == 20
