"""Fault injection, recovery times, and the final audit."""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from offbeat.benchmarks.chaos import proxy
from offbeat.benchmarks.chaos.disk import SmallDisk
from offbeat.benchmarks.chaos.faults import (
    Fault,
    FaultKind,
    MissedError,
    pids,
)
from offbeat.benchmarks.chaos.injector import FaultInjector
from offbeat.benchmarks.chaos.report import ChaosReport, InjectedFault
from offbeat.benchmarks.chaos.run_monitor import FOLDER_S, RunUnderChaos
from offbeat.benchmarks.chaos.second_host import SecondHost
from offbeat.benchmarks.chaos.second_node import SecondNode, cluster_environment
from offbeat.deploy.cli.audit import AuditError, as_tree, examine
from offbeat.deploy.local.processes import adopt_orphans
from offbeat.services.redis.server import server_binary

FAULT_INTERVAL_S = (0.5, 3.0)
STAGE_S = 20.0
JOIN_S = 120.0
"""Of the second node."""
POLL_S = 0.05
START_S = 900.0
END_S = 360.0
CONFIG = Path(__file__).parents[2] / "deploy" / "configs" / "quickstart.yaml"
CHAOS_OVERRIDES = (
    "custom_envs.FrozenLake.env_type=offbeat.benchmarks.chaos.faulty_env:FaultyLakeEnv",
    "custom_envs.FrozenLake.execution=process",
    "custom_envs.FrozenLake.step_timeout_s=5",
    "+custom_envs.FrozenLake.memory_gib=0.5",
    "rollout_batch_size=16",
    "train_env_manager.group_size=4",
    "train_env_manager.num_env_groups=6",
    "rollout.num_workers=2",
    "rollout.max_env_num_per_worker=12",
    "warm_start.steps=40",
    "eval_steps=0",
    "final_val_batch_size=8",
    "save_steps=2",
    "buffer.worker_timeout_s=4",
    "buffer.learner_timeout_s=3",
    "actor_infer.update_timeout_s=30",
)
"""Envs in processes, frequent checkpoints, short timeouts."""


class Chaos:
    def __init__(
        self, run: RunUnderChaos, seed: int, overlap: float, patience_s: float, echo: Callable[[str], None]
    ) -> None:
        """overlap: share of faults without a wait for recovery. patience_s: limit without progress."""
        self._overlap = overlap
        self._patience_s = patience_s
        self._run = run
        self._rng = random.Random(seed)
        self._log = echo
        self._report = ChaosReport(seed)
        self._began = 0.0

    def run(
        self,
        faults: Sequence[Fault],
        minutes: float,
        end_s: float,
        node: SecondNode,
        disk: SmallDisk,
        orders: Path,
    ) -> ChaosReport:
        """Inject faults for `minutes`, wait for the end (up to `end_s` without a step), audit."""
        started = time.monotonic()
        self._node = node
        self._hand = FaultInjector(
            self._run,
            node,
            disk,
            orders,
            self._rng,
            pause=self._pause,
            wait=lambda done, s: self._wait(done, s) is not None,
        )
        refusals = (disk.refusal, node.host.refusal if node.host is not None else "")
        self._report.notes += [refusal for refusal in refusals if refusal]
        try:
            if self._wait(self._run.has_folder, FOLDER_S) is not None:
                disk.attach()
            if self._wait(lambda: (self._run.step() or -1) >= 1, START_S) is None:
                self._complain(f"no step in {START_S:.0f} s, see {self._run.log}")
            else:
                self._strike_all(faults, minutes)
            self._end(end_s)
        finally:
            node.close()
            self._run.close()
            self._report.leftovers = self._run.leftovers()
            disk.keep()
        self._report.wall_s = round(time.monotonic() - started, 1)
        self._report.complaints += self._run.complaints
        self._audit()
        return self._report

    def _end(self, end_s: float) -> None:
        step, since = self._run.step(), time.monotonic()
        while self._run.running and time.monotonic() < since + end_s:
            self._pause(POLL_S)
            if (now := self._run.step()) is not None and now != step:
                step, since = now, time.monotonic()
        code = self._report.exit_code = self._run.process.poll()
        if code is None:
            self._complain(f"the run neither ended nor made a step for {end_s:.0f} s after the last fault")
        elif code:
            self._complain(f"exit code {code}, see {self._run.log}")

    def _strike_all(self, faults: Sequence[Fault], minutes: float) -> None:
        self._began = time.monotonic()
        for number, fault in enumerate(faults, start=1):
            if time.monotonic() - self._began > 60 * minutes or not self._run.running:
                self._log(f"{number - 1} of {len(faults)} faults in the time there was")
                return
            self._pause(self._rng.uniform(*FAULT_INTERVAL_S))
            self._strike(number, fault)

    def _strike(self, number: int, fault: Fault) -> None:
        at_s, step = round(time.monotonic() - self._began, 2), self._run.step()
        injected = InjectedFault(fault.name, at_s, -1 if step is None else step)
        self._report.injected.append(injected)
        if fault.act is FaultKind.PARTITION:
            self._wait(lambda: bool(self._hand.victims(fault)), JOIN_S)
        before = pids(self._hand.victims(fault)) if fault.has_victim else set[int]()
        try:
            if fault.during and self._wait(lambda: self._run.stage() == fault.during, STAGE_S, poll_s=0.001) is None:
                raise MissedError(f"the learner never reached its stage {fault.during}")
            if not self._run.running:
                raise MissedError("the run had ended")
            step = self._run.step() or injected.step
            injected_at = time.monotonic()
            injected.lasted_s = round(self._hand.strike(fault), 2)
        except MissedError as error:
            injected.missed = str(error)
            self._log(f"{number:3d} {fault.name}: {error}")
            return
        if self._rng.random() < self._overlap:
            self._log(f"{number:3d} {fault.name} at step {step}, and on at once")
            return
        self._wait_for_recovery(fault, injected, before, injected_at)
        self._wait_for_progress(injected, step, injected_at)
        back = "" if injected.back_s is None else f"back after {injected.back_s:.1f} s, "
        steps = "no step since" if injected.next_step_s is None else f"two steps after {injected.next_step_s:.1f} s"
        self._log(f"{number:3d} {fault.name} at step {step}: {back}{steps}")

    def _wait_for_recovery(self, fault: Fault, injected: InjectedFault, before: set[int], injected_at: float) -> None:
        if fault.act is FaultKind.DISK:
            injected.back_s = self._wait(lambda: self._run.trouble() == "", self._patience_s, since=injected_at)
        elif fault.comes_back:
            injected.back_s = self._wait(
                lambda: bool(pids(self._hand.victims(fault)) - before), self._patience_s, since=injected_at
            )
        else:
            return
        if injected.back_s is None and self._run.running:
            failure = "no checkpoint was written" if fault.act is FaultKind.DISK else "no process of its kind came back"
            self._complain(f"{fault.name}: {failure} within {self._patience_s:.0f} s")

    def _wait_for_progress(self, injected: InjectedFault, step: int, injected_at: float) -> None:
        injected.next_step_s = self._wait(
            lambda: (self._run.step() or -1) >= step + 2, self._patience_s, since=injected_at
        )
        if injected.next_step_s is None and self._run.running:
            self._complain(
                f"{injected.fault}: the run stands still at step {self._run.step()} since {self._patience_s:.0f} s"
            )

    def _wait(
        self, done: Callable[[], bool], timeout_s: float, *, since: float | None = None, poll_s: float = POLL_S
    ) -> float | None:
        """Return seconds from `since` until `done`; None on timeout or after the run's end."""
        began = time.monotonic()
        while not done():
            if time.monotonic() > began + timeout_s or not self._run.running:
                return None
            self._pause(poll_s)
        return round(time.monotonic() - (began if since is None else since), 2)

    def _pause(self, seconds: float) -> None:
        if seconds >= POLL_S:
            self._run.record_processes()
            self._node.ensure_running(self._run.root, self._run.redis_url())
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 1.0:
            time.sleep(1.0)
            self._run.record_processes()
        time.sleep(max(left_s, 0.0))

    def _complain(self, complaint: str) -> None:
        self._log(f"    {complaint}")
        self._report.complaints.append(complaint)

    def _audit(self) -> None:
        try:
            result, evidence = examine(self._run.output_dir)
        except AuditError as error:
            self._complain(f"no audit: {error}")
            return
        tree = as_tree(result, evidence)
        del tree["groups"]
        self._report.audit = tree
        self._report.steps = result.lineage.last


def run_chaos(
    folder: Path,
    faults: Sequence[Fault],
    *,
    minutes: float,
    seed: int,
    steps: int,
    overlap: float,
    patience_s: float,
    echo: Callable[[str], None],
    overrides: Sequence[str],
) -> ChaosReport:
    folder = folder.resolve()
    disk = SmallDisk(folder)
    host = SecondHost() if any(fault.act is FaultKind.PARTITION for fault in faults) else None
    adopt_orphans()
    orders = folder.with_name(f"{folder.name}.orders")
    orders.mkdir(parents=True, exist_ok=True)
    server = proxy.write_server_script(orders / "server", server_binary(None), orders)
    fault_overrides = (f"+custom_envs.FrozenLake.env_config.orders={orders}", f"redis.server={server}")
    all_overrides = [*CHAOS_OVERRIDES, *fault_overrides, f"seed={seed}", f"max_steps={steps}", *overrides]
    environment = cluster_environment()
    run = RunUnderChaos(CONFIG, folder, f"chaos-{seed}", all_overrides, environment)
    echo(f"the run's log: {run.log}")
    node = SecondNode(folder.with_name(f"{folder.name}.node.log"), environment, host)
    return Chaos(run, seed, overlap, patience_s, echo).run(faults, minutes, END_S, node, disk, orders)
