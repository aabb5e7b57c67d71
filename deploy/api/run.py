"""Runs in processes of their own, which outlive the caller.

Invariant: the calling process gets no Ray, CUDA or signal handler.
"""

import base64
import html
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import psutil

from offbeat.deploy import run_folder
from offbeat.deploy.api.episode import Episode, read_episodes
from offbeat.deploy.config.loader import dump_yaml, load_run, read_run
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.report.history import RunHistory
from offbeat.deploy.report.report import CURVE, REPORT, draw_curve
from offbeat.services.metric_registry import current_names
from offbeat.services.telemetry import MetricRecord, Partial
from offbeat.trainer.trackers.metrics_file import METRICS_FILE, read_records

State = Literal["running", "finished", "stopped", "failed"]
EXIT_STATES: dict[int, State] = {0: "finished", 6: "finished", 130: "stopped"}
"""Of `offbeat train`; 6 if no step had a gradient, which the report explains."""
POLL_S = 0.2
TAIL_LINES = 30


class RunFailedError(RuntimeError):
    """Failed run, with the end of its output."""


class RunElsewhereError(RuntimeError):
    """Run of another host or container, to which no signal can be sent."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Compose, validate and check a run's configuration.

    path: a YAML file. overrides: `key=value`.

    Examples:
        >>> config = load_config("deploy/configs/quickstart.yaml", ["seed=2", "max_steps=50"])
        >>> config.seed, config.max_steps
        (2, 50)

    Raises:
        ConfigError: invalid; lists every problem.
    """
    return load_run(Path(path), overrides)


def train(config: RunConfig | str | Path, overrides: Sequence[str] = (), *, resume: bool = False) -> "Run":
    """Start `offbeat train` in a separate process.

    config: a configuration or a YAML file. overrides: `key=value`. resume: continue from `output_dir`'s newest
    checkpoint; otherwise an earlier run there is moved aside.

    Raises:
        ConfigError: the configuration is invalid.
    """
    if not isinstance(config, RunConfig):
        config = load_config(config, overrides)
    elif overrides:
        raise ValueError("overrides are applied by load_config: train(load_config(path, overrides))")
    config = config.model_copy(update={"output_dir": config.output_dir.resolve()})
    workspace = Path(tempfile.mkdtemp(prefix="offbeat-"))
    source, console = workspace / f"{config.exp_name}.yaml", workspace / "console.log"
    source.touch(mode=0o600)  # may hold passwords
    source.write_text(dump_yaml(config), encoding="utf-8")
    command = [sys.executable, "-m", "offbeat.deploy.cli.app", "train", str(source)]
    if resume:
        command.append("resume_from_checkpoint=true")
    with console.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    run = Run(config.output_dir, process=process, console=console)
    weakref.finalize(run, _remove_if_ended, workspace, process)
    return run


class Run:
    """A run and its folder."""

    def __init__(
        self, folder: Path, *, process: "subprocess.Popen[bytes] | None" = None, console: Path | None = None
    ) -> None:
        self.folder = folder
        self._process = process
        self._console = console

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        """Return the run in a folder.

        Raises:
            FileNotFoundError: there is none.
        """
        path = Path(folder).resolve()
        if not run_folder.holds_run(path):
            raise FileNotFoundError(f"{path} holds no run: expected one of {', '.join(run_folder.MARKS)}")
        return cls(path)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.state})"

    @property
    def config(self) -> RunConfig:
        """Saved configuration.

        Raises:
            ConfigError: not yet written, or by another version of Offbeat.
        """
        return read_run(self.folder / run_folder.CONFIG)

    @property
    def state(self) -> State:
        """`running`, `finished` (all steps, also without a gradient), `stopped` (can be resumed), or `failed`, known only
        to the `Run` of `train`.
        """
        code = None if self._process is None else self._process.poll()
        if code is not None:
            return EXIT_STATES.get(code, "failed")
        if self._process is not None or run_folder.find_holder(self.folder) is not None:
            return "running"
        newest = run_folder.newest_saved(self.folder)
        return "finished" if newest is not None and newest[0] >= self.config.max_steps else "stopped"

    @property
    def console(self) -> str:
        """Console output; empty for an opened run."""
        return "" if self._console is None else self._console.read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Wait for the end; return the report, or None if stopped.

        Raises:
            RunFailedError: the run failed.
            TimeoutError: still running after `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (state := self.state) == "running":
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.folder} is still running after {timeout_s:g} s")
            time.sleep(POLL_S)
        if state == "failed":
            raise RunFailedError("\n".join(self.console.splitlines()[-TAIL_LINES:]))
        return self.report if state == "finished" else None

    def stop(self, timeout_s: float = 120.0) -> None:
        """Stop after the current step, with a checkpoint.

        Raises:
            RunElsewhereError: it runs on another host or in another container.
            TimeoutError: still running after `timeout_s`.
        """
        process: psutil.Process | None = None
        with suppress(psutil.NoSuchProcess):
            if self._process is not None:
                self._process.send_signal(signal.SIGINT)
            elif (holder := run_folder.find_holder(self.folder)) is not None:
                if not holder.is_here:
                    where = "on another host or in a container" if holder.place else "whose host is unknown"
                    raise RunElsewhereError(f"{self.folder} is used by {holder}, {where}: stop it there")
                process = psutil.Process(holder.pid)
                process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + timeout_s
        while self.state == "running" or (process is not None and _is_alive(process)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.folder} is still running {timeout_s:g} s after it was asked to stop")
            time.sleep(POLL_S)

    def metrics(self, source: str | None = "learner") -> pd.DataFrame:
        """Return the metric records in order.

        source: `learner` (a row per optimizer step, some at start without one), `eval`, `rollout`, `generation`,
        `weights`, ...; None: all. Columns: `time` (Unix, s), `source`, `step`, `label.NAME`, and one per metric.
        """
        rows: list[dict[str, Any]] = []
        for record in read_records(self.folder / METRICS_FILE):
            if (source is not None and record["source"] != source) or not record["values"]:
                continue
            labels = {f"label.{name}": value for name, value in record["labels"].items()}
            row = {"time": record["time"], "source": record["source"], "step": record["step"]}
            rows.append({**row, **labels, **current_names(record["source"], record["values"])})
        return pd.DataFrame(rows)

    def episodes(self, limit: int = 8, *, kind: Literal["before", "during", "after"] | None = None) -> list[Episode]:
        """Return episodes of the newest evaluation, optionally of a `kind`."""
        return read_episodes(self.folder, limit, kind)

    @property
    def report(self) -> dict[str, Any] | None:
        """Content of `report.json`, if any."""
        try:
            return json.loads((self.folder / REPORT).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    @property
    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first, for `from_pretrained`."""
        folders = (self.folder / "checkpoints").glob("step-*")
        return sorted(path for path in folders if path.name.removeprefix("step-").isdecimal())

    def _repr_html_(self) -> str:
        """Return the learning curve for notebooks."""
        history = self._history()
        last = history.last_step
        facts = [self.state, f"step {last.number}" if last else "no step yet"]
        if last and "success" in last.values:
            facts.append(f"success {last.values['success']:.2f}")
        heading = f"<b>{html.escape(self.folder.name)}</b>: {html.escape(', '.join(facts))}"
        if last is None:
            return f"<div>{heading}</div>"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / CURVE
            draw_curve(path, self.config, history, {})
            data = base64.b64encode(path.read_bytes()).decode()
        return f'<div>{heading}<br><img width="880" alt="learning curve" src="data:image/png;base64,{data}"></div>'

    def _history(self) -> RunHistory:
        history = RunHistory()
        for record in read_records(self.folder / METRICS_FILE):
            stored = current_names(record["source"], record["values"])
            values = {name: Partial("last", value) for name, value in stored.items() if value is not None}
            parsed = MetricRecord(record["source"], values, record["step"], record["labels"], record["time"])
            if not history.attempts and record["source"] != "command":  # as of a run that a mesh has started
                history.attempts = [(parsed.time, parsed.time)]
            history.add([(record["id"], parsed)])
        return history


def _remove_if_ended(workspace: Path, process: "subprocess.Popen[bytes]") -> None:
    """Remove the folder of a configuration and a console's output, unless a process still uses it."""
    if process.poll() is not None:
        shutil.rmtree(workspace, ignore_errors=True)


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a thread of a process has not ended; a run's folder is free a little earlier."""
    try:
        ended = process.status() == psutil.STATUS_ZOMBIE and process.num_threads() == 1  # the main thread may end first
        return process.is_running() and not ended
    except psutil.NoSuchProcess:
        return False
