"""`offbeat bench peer`: runs, evaluates and compares both sides; existing runs are reused by default."""

import itertools
import json
import shutil
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from offbeat.benchmarks.harness.result import console, cpu_name, mean_interval, show
from offbeat.benchmarks.peer import data_steps
from offbeat.benchmarks.peer.done import MeasuredWith, read_done
from offbeat.benchmarks.peer.options import (
    DATA_SETTINGS,
    OFFBEAT,
    TRL,
    WARM_START_S,
    PeerOptions,
    PeerSideError,
)
from offbeat.benchmarks.peer.plot import draw
from offbeat.benchmarks.peer.processes import (
    evaluate,
    make_policy,
    run_offbeat,
    run_trl,
)
from offbeat.benchmarks.peer.records import SideRun, read_offbeat, read_trl
from offbeat.benchmarks.peer.settings import (
    SETTINGS,
    PeerSetting,
    evaluate_job,
    offbeat_config,
    train_job,
    warm_config,
    with_overrides,
)
from offbeat.benchmarks.peer.venv import TRL_VENV
from offbeat.deploy.config.run import RunConfig

TARGETS = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Success rates, compared at the highest that both sides reach."""
MEDIANS = ("trajectories_per_s", "step_s", "step_cpu_s", "startup_s")
"""Of a side, in the order of the table's columns."""
SUCCESSES = "successes.json"


class PeerBench:
    def __init__(self, options: PeerOptions, echo: Callable[[str], None]) -> None:
        self._options = options
        self._log = echo
        self._guest = TRL_VENV.python_of(options.venv)

    def measure(self, setting: PeerSetting, seed: int, side: str) -> SideRun:
        folder, done = self._folder(setting, seed, side), self.find_done(setting, seed, side)
        config = self.config(setting, seed, folder.resolve() / "run", side)
        if done is None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self._run(setting, seed, side, config, folder)
            done = MeasuredWith.now(self._options.steps or setting.steps, self._options.overrides)
            done.write(folder)
        policy = self._policy(setting, seed)
        run = replace(read_trl(folder) if side == TRL else read_offbeat(folder / "run", policy), measured=done)
        if setting.from_command:
            if side == TRL:
                run = replace(run, startup_s=run.startup_s + _warm_start_s(policy))
            run = run.from_command()
        job_config = self.config(setting, seed, folder.resolve() / "run", TRL)
        return self._rated(setting, job_config, run, folder, f"{setting.name}, seed {seed}, {side}")

    def find_done(self, setting: PeerSetting, seed: int, side: str) -> MeasuredWith | None:
        """Return with what the run to reuse was measured; raises PeerError if it is another."""
        steps, folder = self._options.steps or setting.steps, self._folder(setting, seed, side)
        return None if self._options.fresh else read_done(folder, steps, self._options.overrides)

    def _folder(self, setting: PeerSetting, seed: int, side: str) -> Path:
        name = f"{TRL}-together" if side == TRL and self._options.together else side
        return self._options.folder / f"{setting.name}-{seed}" / name

    def config(self, setting: PeerSetting, seed: int, output: Path, side: str) -> RunConfig:
        """Return a side's configuration, from which TRL's job is derived; create a missing policy."""
        steps, policy = self._options.steps or setting.steps, self._policy(setting, seed)
        warm_started = replace(setting, from_command=False) if side == TRL else setting
        return offbeat_config(warm_started, seed, steps, policy, output)

    def _run(self, setting: PeerSetting, seed: int, side: str, config: RunConfig, folder: Path) -> None:
        self._log(f"setting {setting.name}, seed {seed}: {side} trains")
        o = self._options
        if side == OFFBEAT:
            run_offbeat(config, folder, 4 * o.max_seconds)
            return
        job = train_job(
            setting, config, folder, threads=o.threads, max_seconds=o.max_seconds, together=o.together
        )  # fmt: skip
        run_trl(self._python(), job, folder, 4 * o.max_seconds)

    def _policy(self, setting: PeerSetting, seed: int) -> Path:
        if setting.pretrained:
            if not (self._options.smollm2 / "config.json").exists():
                where = self._options.smollm2
                raise PeerSideError(
                    f"no model in {where}: make it with `offbeat model smollm2 {where}`, or name it by --smollm2"
                )
            return self._options.smollm2.resolve()
        out = (self._options.folder / "policies" / f"seed-{seed}").resolve()
        if not (out / "model.safetensors").exists() or (setting.from_command and not _seconds_file(out).exists()):
            self._log(f"seed {seed}: warm start of the policy that both sides begin with")
            shutil.rmtree(out, ignore_errors=True)
            make_policy(warm_config(setting, seed, out.with_name(f"warm-{seed}")), out, self._options.max_seconds)
        return out

    def _rated(self, setting: PeerSetting, config: RunConfig, run: SideRun, folder: Path, who: str) -> SideRun:
        if not setting.eval_tasks or not run.snapshots:
            return run
        successes_file = folder / SUCCESSES
        if not successes_file.exists():
            self._log(f"{who}: evaluating {len(run.snapshots)} snapshots")
            folders = [snapshot.folder for snapshot in run.snapshots]
            job = evaluate_job(setting, config, folders, folder / "evaluated.json", threads=self._options.threads)
            successes_file.write_text(json.dumps(evaluate(self._python(), job, folder, self._options.max_seconds)))
        return run.with_successes(json.loads(successes_file.read_text(encoding="utf-8")))

    def _python(self) -> Path:
        if self._guest is None:
            self._log(f"making TRL's venv in {self._options.venv} (minutes, once)")
            self._guest = TRL_VENV.ensure(self._options.venv)
        return self._guest


def _seconds_file(policy: Path) -> Path:
    return policy.with_suffix(".json")


def _warm_start_s(policy: Path) -> float:
    return json.loads(_seconds_file(policy).read_text(encoding="utf-8"))[WARM_START_S]


def run(options: PeerOptions) -> dict[str, Any]:
    names = [name for name in options.settings if name not in DATA_SETTINGS]
    settings = [with_overrides(SETTINGS[name], options.overrides) for name in names]
    with console().status("starting") as status:
        bench = PeerBench(options, status.update)
        for setting, seed, side in itertools.product(settings, options.seeds, options.sides):
            bench.find_done(setting, seed, side)
        results = [_setting(bench, options, setting) for setting in settings]
        of_rows = [data_steps.run(options, name, status.update) for name in DATA_SETTINGS if name in options.settings]
    for result in results:
        _show(result)
    for result in of_rows:
        data_steps.show_result(result)
    if options.plot is not None:
        draw(options.plot, results)
    return {"settings": [*results, *of_rows]}


def _setting(bench: PeerBench, options: PeerOptions, setting: PeerSetting) -> dict[str, Any]:
    sides = [side for side in (OFFBEAT, TRL) if side in options.sides]
    batch = bench.config(setting, options.seeds[0], Path("run"), TRL).rollout_batch_size
    # the sides in turn, as a shared host's speed changes over minutes
    measured = [(side, seed, bench.measure(setting, seed, side)) for seed in options.seeds for side in sides]
    runs = {side: {seed: run for of, seed, run in measured if of == side} for side in sides}
    return {"setting": setting.name, "title": setting.title, **compare(runs, batch, setting.target)}


def compare(runs: dict[str, dict[int, SideRun]], batch: int, target: float | None = None) -> dict[str, Any]:
    """Return medians over seeds, ratios of the sides, and each run.

    The time ratio at equal success is a median over seeds, at `target` or each seed's highest common success. Means of
    success are over the time of the shortest run; their difference between the sides is a mean over seeds.
    """
    seeds = {seed for by_seed in runs.values() for seed in by_seed}
    targets = {
        seed: target or common_target([by_seed[seed] for by_seed in runs.values() if seed in by_seed]) for seed in seeds
    }
    horizon_s = common_horizon_s([run for by_seed in runs.values() for run in by_seed.values()])
    sides = {side: _side(by_seed, batch, targets, horizon_s) for side, by_seed in runs.items()}
    result: dict[str, Any] = {"batch": batch, "horizon_s": horizon_s, "sides": sides}
    if OFFBEAT in sides and TRL in sides:
        ours, theirs = sides[OFFBEAT], sides[TRL]
        result["rate_ratio"] = ours["trajectories_per_s"] / theirs["trajectories_per_s"]
        times = [
            (o["seconds_to_target"], t["seconds_to_target"]) for o, t in zip(ours["runs"], theirs["runs"], strict=True)
        ]
        if known := [theirs_s / ours_s for ours_s, theirs_s in times if ours_s and theirs_s]:
            result["speedup_to_target"] = statistics.median(known)
        if horizon_s is not None and len(seeds) > 1:
            pairs = zip(ours["runs"], theirs["runs"], strict=True)
            differences = [o["mean_success"] - t["mean_success"] for o, t in pairs]
            result["mean_success_difference"] = asdict(mean_interval(differences))
    return result


def common_horizon_s(runs: Sequence[SideRun]) -> float | None:
    """Return the time of the earliest last snapshot; None unless all runs have evaluated snapshots."""
    if not runs or any(len(run.snapshots) < 2 or run.snapshots[-1].success is None for run in runs):
        return None
    return min(run.snapshots[-1].seconds for run in runs)


def common_target(runs: Sequence[SideRun]) -> float | None:
    return next((t for t in TARGETS if runs and all(run.seconds_to(t) is not None for run in runs)), None)


def _side(
    by_seed: dict[int, SideRun], batch: int, targets: dict[int, float | None], horizon_s: float | None
) -> dict[str, Any]:
    return {
        "trajectories_per_s": statistics.median(run.rate(batch) for run in by_seed.values()),
        "step_s": statistics.median(run.step_s() for run in by_seed.values()),
        "step_cpu_s": _median(run.step_cpu_s() for run in by_seed.values()),
        "startup_s": statistics.median(run.startup_s for run in by_seed.values()),
        "runs": [
            {
                "seed": seed,
                "measured": run.measured and asdict(run.measured),
                "trajectories_per_s": run.rate(batch),
                "step_s": run.step_s(),
                "step_cpu_s": run.step_cpu_s(),
                "step_cpu_s_by_kind": run.step_cpu_s_by_kind(),
                "startup_s": run.startup_s,
                "target_success": targets[seed],
                "seconds_to_target": _seconds_to(run, targets[seed]),
                "mean_success": None if horizon_s is None else run.mean_success(horizon_s),
                "steps": [asdict(step) for step in run.steps],
                "curve": [{"step": s.step, "seconds": s.seconds, "success": s.success} for s in run.snapshots],
            }
            for seed, run in by_seed.items()
        ],
    }


def _seconds_to(run: SideRun, target: float | None) -> float | None:
    return None if target is None else run.seconds_to(target)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _show(result: dict[str, Any]) -> None:
    rows = [
        [
            side,
            run["seed"],
            run["trajectories_per_s"],
            run["step_s"],
            run["step_cpu_s"],
            run["startup_s"],
            _reached(run),
            run["mean_success"],
            _final(run),
        ]
        for side, summary in result["sides"].items()
        for run in summary["runs"]
    ]
    rows += [
        [side, "median", *(summary[name] for name in MEDIANS), None, None, None]
        for side, summary in result["sides"].items()
    ]
    if "rate_ratio" in result:
        speedup = result.get("speedup_to_target")
        rows.append(["offbeat / trl", "", result["rate_ratio"], None, None, None, speedup, None, None])
    if "mean_success_difference" in result:
        difference = "{mean:+.3f} ({low:+.3f} to {high:+.3f})".format_map(result["mean_success_difference"])
        rows.append(["offbeat - trl, 95 %", "", None, None, None, None, None, difference, None])
    horizon = f", mean success over {result['horizon_s']:.0f} s" if result["horizon_s"] is not None else ""
    columns = (
        "side",
        "seed",
        "trained trajectories/s",
        "s/step",
        "CPU s/step",
        "start, s",
        "s to the same success",
        "mean success",
        "success at the end",
    )
    show(f"({result['setting']}) {result['title']}{horizon}; {cpu_name()}", columns, rows)
    for side, summary in result["sides"].items():
        for run in summary["runs"]:
            spent = ", ".join(
                f"{kind} {seconds:.2f}" for kind, seconds in run["step_cpu_s_by_kind"].items() if seconds >= 0.01
            )
            console().print(f"CPU s/step of {side}, seed {run['seed']}: {spent or 'not seen'}", markup=False)
            measured = MeasuredWith(**run["measured"])
            if not measured.is_of_now:
                origin = f"{measured.measured_at}, build {measured.build}, {measured.cpu}"
                console().print(f"{side}, seed {run['seed']} was measured {origin}", markup=False)


def _reached(run: dict[str, Any]) -> str | None:
    return None if run["seconds_to_target"] is None else f"{run['seconds_to_target']:.1f} to {run['target_success']:g}"


def _final(run: dict[str, Any]) -> float | None:
    return run["curve"][-1]["success"] if run["curve"] else None
