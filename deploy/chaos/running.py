"""Strikes a run as planned and measures how it comes back; then lets it end by itself and audits what it left."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from deploy.audit_command import AuditError, as_tree, examine
from deploy.chaos.faults import Fault, pids, plan, processes_of, strike
from deploy.chaos.watching import RunUnderChaos

QUIET_S = (0.5, 3.0)
"""Between a recovery and the next fault."""
RECOVERY_S = 90.0
STAGE_S = 20.0
POLL_S = 0.05
START_S = 240.0
END_S = 120.0
CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
SMALL = (
    "custom_envs.FrozenLake.execution=process",
    "custom_envs.FrozenLake.step_timeout_s=5",
    "rollout_batch_size=16",
    "train_env_manager.group_size=4",
    "train_env_manager.num_env_groups=6",
    "rollout.max_env_num_per_worker=24",
    "warm_start.steps=40",
    "eval_steps=0",
    "final_val_batch_size=8",
    "save_steps=2",
    "buffer.worker_timeout_s=4",
    "buffer.learner_timeout_s=3",
)
"""A small run whose envs are processes, which checkpoints often and notices deaths soon."""


@dataclass
class Struck:
    """One fault and what became of it."""

    fault: str
    at_s: float
    """Since the run's first step."""
    step: int
    stopped_s: float = 0.0
    back_s: float | None = None
    """Until a process of its kind was there again; None where none was hit or none needed to come back."""
    next_step_s: float | None = None
    """Until the run had published two more steps."""
    missed: str = ""
    """Why it could not be done."""


@dataclass
class ChaosReport:
    """Everything that was seen."""

    seed: int
    struck: list[Struck] = field(default_factory=list[Struck])
    exit_code: int | None = None
    steps: int = 0
    wall_s: float = 0.0
    audit: dict[str, Any] = field(default_factory=dict[str, Any])
    leftovers: list[str] = field(default_factory=list[str])
    complaints: list[str] = field(default_factory=list[str])

    @property
    def passed(self) -> bool:
        return self.exit_code == 0 and bool(self.audit.get("proven")) and not self.leftovers and not self.complaints

    @property
    def done(self) -> list[Struck]:
        """Faults that were done."""
        return [each for each in self.struck if not each.missed]

    def by_kind(self) -> dict[str, dict[str, Any]]:
        """How often, and how soon the run came back: median and longest, s."""
        out: dict[str, dict[str, Any]] = {}
        for name in dict.fromkeys(each.fault for each in self.done):
            here = [each for each in self.done if each.fault == name]
            out[name] = {
                "count": len(here),
                "back_s": _spread([each.back_s for each in here]),
                "two_steps_s": _spread([each.next_step_s for each in here]),
            }
        return out

    def as_tree(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self) | {"passed": self.passed, "faults": len(self.done), "by_kind": self.by_kind()}


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"median": round(statistics.median(known), 2), "max": round(max(known), 2)} if known else None


class Chaos:
    """One run and the faults that are done to it."""

    def __init__(self, run: RunUnderChaos, seed: int, overlap: float, say: Callable[[str], None]) -> None:
        """overlap: share of the faults whose recovery is not waited for before the next one."""
        self._overlap = overlap
        self._run = run
        self._rng = random.Random(seed)
        self._say = say
        self._report = ChaosReport(seed)
        self._began = 0.0

    def go(self, faults: Sequence[Fault], minutes: float, end_s: float) -> ChaosReport:
        """Wait for the first step, do faults for up to `minutes`, wait up to `end_s` for the end, audit."""
        started = time.monotonic()
        try:
            if self._wait(lambda: (self._run.step() or -1) >= 1, START_S) is None:
                self._complain(f"no step in {START_S:.0f} s, see {self._run.log}")
            else:
                self._strike_all(faults, minutes)
            self._report.exit_code = self._run.wait(end_s) if self._run.running else self._run.process.returncode
            if self._report.exit_code is None:
                self._complain(f"the run did not end within {end_s:.0f} s of the last fault")
            elif self._report.exit_code:
                self._complain(f"exit code {self._report.exit_code}, see {self._run.log}")
        finally:
            self._run.close()
        self._report.wall_s = round(time.monotonic() - started, 1)
        self._report.leftovers = self._run.leftovers()
        self._audit()
        return self._report

    def _strike_all(self, faults: Sequence[Fault], minutes: float) -> None:
        self._began = time.monotonic()
        for number, fault in enumerate(faults, start=1):
            if time.monotonic() - self._began > 60 * minutes or not self._run.running:
                self._say(f"{number - 1} of {len(faults)} faults in the time there was")
                return
            self._pause(self._rng.uniform(*QUIET_S))
            self._strike(number, fault)

    def _strike(self, number: int, fault: Fault) -> None:
        struck = Struck(fault.name, round(time.monotonic() - self._began, 2), self._run.step() or -1)
        self._report.struck.append(struck)
        before = processes_of(self._run.root, fault.mark) if fault.mark else []
        if fault.mark and not before:
            struck.missed = "there was no such process at that moment"
        elif fault.during and self._wait(lambda: self._run.stage() == fault.during, STAGE_S, poll_s=0.001) is None:
            struck.missed = f"the learner was never seen in its {fault.during}"
        if struck.missed or not self._run.running:
            self._say(f"{number:3d} {fault.name}: {struck.missed or 'the run had ended'}")
            struck.missed = struck.missed or "the run had ended"
            return
        step = self._run.step()
        hit = time.monotonic()
        try:
            if fault.mark:
                victim = self._rng.choice(processes_of(self._run.root, fault.mark) or before)
                struck.stopped_s = round(strike(fault, victim, self._rng, self._pause), 2)
            else:
                self._run.cut_connections()
        except (psutil.NoSuchProcess, OSError) as error:
            struck.missed = f"it had ended: {error}"
            return
        if self._rng.random() < self._overlap:
            self._say(f"{number:3d} {fault.name} at step {step}, and on at once")
            return
        self._see_it_back(fault, struck, pids(before), hit)
        self._see_progress(struck, step if step is not None else struck.step, hit)
        back = "" if struck.back_s is None else f"back after {struck.back_s:.1f} s, "
        steps = "no step since" if struck.next_step_s is None else f"two steps after {struck.next_step_s:.1f} s"
        self._say(f"{number:3d} {fault.name} at step {step}: {back}{steps}")

    def _see_it_back(self, fault: Fault, struck: Struck, before: set[int], hit: float) -> None:
        if fault.stops or not fault.comes_back or not fault.mark:
            return
        struck.back_s = self._wait(
            lambda: bool(pids(processes_of(self._run.root, fault.mark)) - before), RECOVERY_S, since=hit
        )
        if struck.back_s is None and self._run.running:
            self._complain(f"{fault.name}: no process of its kind came back within {RECOVERY_S:.0f} s")

    def _see_progress(self, struck: Struck, step: int, hit: float) -> None:
        struck.next_step_s = self._wait(lambda: (self._run.step() or -1) >= step + 2, RECOVERY_S, since=hit)
        if struck.next_step_s is None and self._run.running:
            self._complain(f"{struck.fault}: the run stands still at step {self._run.step()} since {RECOVERY_S:.0f} s")

    def _wait(
        self, done: Callable[[], bool], timeout_s: float, *, since: float | None = None, poll_s: float = POLL_S
    ) -> float | None:
        """Seconds from `since` until `done`, or None if it was not in time or the run ended."""
        began = time.monotonic()
        while not done():
            if time.monotonic() > began + timeout_s or not self._run.running:
                return None
            self._pause(poll_s)
        return round(time.monotonic() - (began if since is None else since), 2)

    def _pause(self, seconds: float) -> None:
        if seconds >= POLL_S:
            self._run.look()
        time.sleep(seconds)

    def _complain(self, what: str) -> None:
        self._say(f"    {what}")
        self._report.complaints.append(what)

    def _audit(self) -> None:
        try:
            found, evidence = examine(self._run.output_dir)
        except AuditError as error:
            self._complain(f"no audit: {error}")
            return
        tree = as_tree(found, evidence)
        del tree["groups"]
        self._report.audit = tree
        self._report.steps = found.lineage.last


def run_chaos(
    folder: Path,
    *,
    minutes: float,
    kills: int,
    seed: int,
    steps: int,
    overlap: float,
    say: Callable[[str], None],
    overrides: Sequence[str],
) -> ChaosReport:
    """A run of `steps` steps in `folder`, and up to `kills` faults in up to `minutes`."""
    run = RunUnderChaos(CONFIG, folder, f"chaos-{seed}", [*SMALL, f"seed={seed}", f"max_steps={steps}", *overrides])
    say(f"the run's log: {run.log}")
    return Chaos(run, seed, overlap, say).go(plan(kills, seed), minutes, END_S)
