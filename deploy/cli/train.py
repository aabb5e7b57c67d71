"""`offbeat train`.

Invariants: the run uses the REST API; every exit ends all processes; exit codes: 0 finished, 1 failed, 6 finished
without having trained anything, 130 stopped.
"""

import asyncio
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from redis.exceptions import ConnectionError as RedisConnectionError

from offbeat.deploy import run_folder
from offbeat.deploy.cli.output import discard_unwritable, flush
from offbeat.deploy.cli.report import update_history
from offbeat.deploy.cli.run_view import LiveView, open_view
from offbeat.deploy.config.loader import dump_yaml
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.doctor.libraries import check_libraries
from offbeat.deploy.local.mesh import LocalMesh
from offbeat.deploy.local.signals import termination_signals
from offbeat.deploy.local.supervision import run_beside
from offbeat.deploy.report.history import RunHistory
from offbeat.deploy.report.report import ReportMaker
from offbeat.deploy.report.saved_history import count_unread_bytes, read_history_file, save_history
from offbeat.deploy.run_marker import FolderInUseError
from offbeat.deploy.run_setup import LOGS, make_log_folder
from offbeat.services.control.client import ControlClient
from offbeat.services.control.interfaces import Health
from offbeat.services.control.run import RunState
from offbeat.services.control.schemas import RunView
from offbeat.services.errors import MeshError, RetryableError
from offbeat.services.ports import find_port_problem
from offbeat.services.redis.connection import connect
from offbeat.services.redis.errors import retryable
from offbeat.services.telemetry import configure_logging

logger = logging.getLogger(__name__)

RESUME = "resume_from_checkpoint"
START_POLL_S = 0.5
WATCH_POLL_S = 1.0
"""Each poll costs CPU time."""
METRICS_PAGE = 2000
NOTED_BYTES = 50_000_000
"""Of metrics, whose reading takes seconds."""
SAVE_INTERVAL_S = 900.0
"""Of the history: a resumed run reads the metrics since then."""
REPORT_PATIENCE_S = 1.0
"""Redis' retry timeout for an unfinished run's report."""
UNREACHABLE_S = 240.0
FINISHED, FAILED, UNTRAINED, INTERRUPTED = 0, 1, 6, 130


class TrainingFailedError(Exception):
    """Permanent failure, naming the log."""


def train(config: RunConfig, config_path: Path, overrides: Sequence[str]) -> int:
    """Run `config` and exit the process, as Ray's threads may never end. Other arguments are for the resuming
    command."""
    if missing := [finding for finding in check_libraries() if finding.state == "problem"]:
        for finding in missing:
            print(f"offbeat: {finding.subject}: {finding.detail}", file=sys.stderr)  # noqa: T201
        return FAILED
    config = config.model_copy(update={"output_dir": config.output_dir.resolve()})
    resume = bool(config.resume_from_checkpoint)
    if config.control.port and (problem := find_port_problem(config.control.host, config.control.port)):
        advice = "end that program, or set another port (control.port=0 takes a free one)"
        print(f"offbeat: control.port: {problem}: {advice}", file=sys.stderr)  # noqa: T201
        return FAILED
    try:
        aside = run_folder.claim(config.output_dir, config.exp_name, resume=resume)
        with run_folder.locked(config.output_dir):
            code = _train(config, resume_command(config_path, overrides), aside)
    except FolderInUseError as error:
        print(f"offbeat: {error}", file=sys.stderr)  # noqa: T201
        code = FAILED
    except OSError as error:
        print(f"offbeat: output_dir {config.output_dir} can't be used: {error}", file=sys.stderr)  # noqa: T201
        code = FAILED
    flush(sys.stdout)
    flush(sys.stderr)
    os._exit(code)


def resume_command(config_path: Path, overrides: Sequence[str]) -> str:
    retained = (override for override in overrides if override.lstrip("+~").partition("=")[0] != RESUME)
    return shlex.join(["offbeat", "train", str(config_path), *retained, f"{RESUME}=true"])


def _train(config: RunConfig, resume: str, aside: Path | None) -> int:
    configure_logging("offbeat", make_log_folder(config))
    run_folder.write_config(config.output_dir, dump_yaml(config))
    view = open_view(config.exp_name, logging_steps=config.logging_steps)
    command = TrainCommand(config, view, resume)
    with discard_unwritable(on_closed=command.interrupt), view:
        if aside is not None:
            view.print(f"An earlier run was moved to {_short_path(aside)}.")
        try:
            return asyncio.run(command.run())
        except (Exception, SystemExit) as error:  # a bug
            logger.exception("the command failed")
            view.close()
            view.print(f"offbeat failed: {error!r}\nRead {_short_path(config.output_dir / LOGS / 'offbeat.log')}")
            return FAILED


class TrainCommand:
    def __init__(self, config: RunConfig, view: LiveView, resume_command: str) -> None:
        self._config = config
        self._view = view
        self._resume_command = resume_command
        self._mesh = LocalMesh(config, started_at=psutil.Process().create_time(), on_progress=view.print)
        self._history = RunHistory()
        self._report = ReportMaker(config, self._history)
        self._interrupted = asyncio.Event()
        self._is_signalled = False
        self._saved_at = time.monotonic()
        self._last: RunView | None = None
        self._warned: set[str] = set()

    async def run(self) -> int:
        """Run to an exit code; no started process outlives an unexpected error.

        They are killed here, as the event loop's end waits for threads that wait for them.
        """
        try:
            return await self._run()
        except BaseException:
            self._mesh.kill()
            raise

    async def _run(self) -> int:
        self._catch_signals()
        try:
            await self._run_until_interrupted(self._run_to_its_end())
        except (TrainingFailedError, MeshError) as error:
            return await self._end_failed(error)
        except RedisConnectionError as error:
            return await self._end_failed(retryable(error))
        if self._interrupted.is_set():
            self._view.print("Stopping ... (Ctrl-C again kills at once)")
            return await self._end_stopped()
        if self._last is not None and self._last.state is RunState.STOPPED:
            self._view.print("The run was stopped over REST.")
            return await self._end_stopped()
        return await self._end_finished()

    def interrupt(self) -> None:
        """Stop with a checkpoint."""
        self._interrupted.set()

    async def _run_until_interrupted(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="run")
        interrupt = asyncio.create_task(self._interrupted.wait(), name="interrupt")
        try:
            await asyncio.wait({task, interrupt}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            for pending in (task, interrupt):
                pending.cancel()
            # A blocked thread continues until the processes that it waits for are ended
            await asyncio.wait({task, interrupt}, timeout=1.0)

    async def _run_to_its_end(self) -> None:
        await self._read_history()
        self._view.print("Starting Redis, Ray, the learner and the services ...")
        # Beside the watch: who asks a service whose Redis is gone waits for its answer
        view = await run_beside(self._start_and_watch(), [self._mesh.supervise()])
        if view.state is RunState.FAILED:
            log = self._config.output_dir / (view.log or LOGS)
            raise TrainingFailedError(f"{view.error}\nRead {_short_path(log)}")

    async def _read_history(self) -> None:
        folder = self._config.output_dir
        unread = await asyncio.to_thread(count_unread_bytes, folder)
        is_long = unread > NOTED_BYTES
        if is_long:
            self._view.print(f"Reading {unread / 1e6:,.0f} MB of the run's metrics ...")
        await asyncio.to_thread(read_history_file, folder, self._history)
        if is_long:
            await self._save_history()

    async def _save_history(self) -> None:
        await asyncio.to_thread(save_history, self._config.output_dir, self._history)
        self._saved_at = time.monotonic()

    async def _start_and_watch(self) -> RunView:
        async with await self._start() as client:
            self._view.print(f"Control service at {client.url}, Redis at {self._mesh.redis_address}")
            self._report.timings = self._mesh.timings
            return await self._watch(client)

    async def _start(self) -> ControlClient:
        starting = asyncio.create_task(self._mesh.start(), name="start")
        try:
            while not starting.done():
                self._view.starting(self._mesh.timings)
                await asyncio.wait({starting}, timeout=START_POLL_S)
            return starting.result()
        finally:
            starting.cancel()

    async def _watch(self, client: ControlClient) -> RunView:
        answered_at = time.monotonic()
        while True:
            try:
                view = await client.show(self._config.exp_name)
                await self._read_metrics(client)
            except RetryableError as error:
                if time.monotonic() > answered_at + UNREACHABLE_S:
                    raise TrainingFailedError(f"{error}\nRead {_short_path(self._config.output_dir / LOGS)}") from error
            else:
                answered_at = time.monotonic()
                if self._last is None and (kept := describe_kept_changes(self._config, view)):
                    self._view.print(kept)
                self._last = view
                self._view.show(view, self._history)
                self._warn(view)
                if time.monotonic() > self._saved_at + SAVE_INTERVAL_S:
                    await self._save_history()
                if view.state.is_terminal or _has_trained(view):
                    return view
            await asyncio.sleep(WATCH_POLL_S)

    def _warn(self, view: RunView) -> None:
        """Print each warning once."""
        for finding in view.diagnosis:
            if finding.is_warning and finding.name not in self._warned:
                self._warned.add(finding.name)
                self._view.print(f"Warning: {finding.finding()}")

    async def _read_metrics(self, client: ControlClient) -> None:
        while True:
            page = await client.metrics(self._config.exp_name, after=self._history.position, limit=METRICS_PAGE)
            self._history.add((record.id, record.record()) for record in page.records)
            if len(page.records) < METRICS_PAGE:
                return

    async def _end_finished(self) -> int:
        self._view.print("Trained. Writing the report ...")
        drawing = asyncio.create_task(asyncio.to_thread(self._report.draw))
        await self._mesh.stop(RunState.FINISHED)
        await drawing
        await asyncio.to_thread(self._report.render)  # its envs' processes would have been stopped, too
        self._view.close()
        self._report.write(self._last.counters if self._last else None, ended_at=time.time())
        self._report.show()
        await self._save_history()
        if self._last is not None and self._last.error:
            self._view.print(f"The run finished, but {self._last.error}")
            return UNTRAINED
        return FINISHED

    async def _end_failed(self, error: Exception) -> int:
        logger.error("the run failed", exc_info=error)
        await asyncio.to_thread(self._write_report)
        await self._mesh.stop(RunState.FAILED)
        self._view.close()
        self._view.print(f"The run failed: {error}")
        if self._is_resumable():
            self._show_resume_command()
        return FAILED

    async def _end_stopped(self) -> int:
        published = await self._mesh.stop_learner()
        await asyncio.to_thread(self._write_report)
        await self._mesh.stop(RunState.STOPPED)
        self._view.close()
        self._view.print(describe_stop(self._config, published))
        if run_folder.newest_saved(self._config.output_dir) is not None:
            self._show_resume_command()
        return INTERRUPTED

    def _is_resumable(self) -> bool:
        was_resumable = self._last is not None and self._last.resumable
        return was_resumable and run_folder.newest_saved(self._config.output_dir) is not None

    def _write_report(self) -> None:
        """Write an unfinished run's report without episodes."""
        if not self._mesh.owns_run:
            return
        try:
            with connect(self._mesh.redis_url, patience_s=REPORT_PATIENCE_S) as redis:
                counters = update_history(redis, self._config.exp_name, self._history)
            self._report.write(counters, ended_at=time.time())
        except Exception:  # its Redis is gone; the exit code is that of the run
            logger.exception("report.json could not be written")
        save_history(self._config.output_dir, self._history)

    def _show_resume_command(self) -> None:
        self._view.print(f"Resume with: {self._resume_command}")

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in termination_signals():
            # Of a terminal that closes, its shell and the kernel send one each
            loop.add_signal_handler(number, self.interrupt if number is signal.SIGHUP else self._on_signal)

    def _on_signal(self) -> None:
        """Stop with a checkpoint at the first signal, and kill at the second one."""
        if self._is_signalled:
            self._mesh.kill()
            os._exit(INTERRUPTED)
        self._is_signalled = True
        self.interrupt()


def describe_kept_changes(config: RunConfig, view: RunView) -> str:
    """Describe the live changes of earlier attempts that override the configuration; empty without any."""
    configured = asdict(config.settings)
    in_force = {name: value for name, value in view.settings.model_dump().items() if value != configured[name]}
    changed = in_force | {name: value for change in view.changes for name, value in change.values.items()}
    kept = [
        f"{name}={value:g} (configured: {configured[name]:g})"
        for name, value in changed.items()
        if value != configured[name]
    ]
    if not kept:
        return ""
    return f"Changed settings are kept: {', '.join(kept)}. `offbeat runs set {view.id} NAME=VALUE` changes them."


def describe_stop(config: RunConfig, published: int) -> str:
    """Describe the checkpoint to resume from. published: newest version."""
    newest = run_folder.newest_saved(config.output_dir)
    if newest is None:
        return "Stopped before the first checkpoint."
    step, path = newest
    repeated = f"\nLater steps, up to {published}, will be trained again." if published > step else ""
    return f"Stopped at step {step} of {config.max_steps}; checkpoint: {_short_path(path)}{repeated}"


def _has_trained(view: RunView) -> bool:
    """Return whether only the mesh is left to stop."""
    learner = view.components.get("learner")
    return view.state is RunState.DRAINING and learner is not None and learner.health is Health.DONE


def _short_path(path: Path | str) -> str:
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return str(path)
