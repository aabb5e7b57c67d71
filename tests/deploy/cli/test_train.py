import io
import json
import os
import pty
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from offbeat.deploy.cli.run_view import open_view
from offbeat.deploy.cli.train import TrainCommand, describe_kept_changes, describe_stop, resume_command
from offbeat.deploy.config.loader import load_run
from offbeat.deploy.run_setup import run_spec
from offbeat.services.control.event_schemas import MetricsView
from offbeat.services.control.run import RunState
from offbeat.services.control.schemas import ChangeView, RunView, SettingsView
from offbeat.services.control.store import RunStore
from offbeat.services.errors import MeshError
from offbeat.services.redis.connection import connect_async
from tests.deploy.cli.test_run_view import view
from tests.paths import QUICKSTART
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.slow


def test_the_command_that_resumes_keeps_what_the_run_was_started_with():
    said = resume_command(Path("my runs/a.yaml"), ["seed=2", "+x={a: 'b c'}"])
    assert shlex.split(said) == [
        *("offbeat", "train", "my runs/a.yaml"),
        *("seed=2", "+x={a: 'b c'}", "resume_from_checkpoint=true"),
    ]


@pytest.mark.parametrize("given", ["resume_from_checkpoint=true", "++resume_from_checkpoint=/a/step-000005"])
def test_the_command_that_resumes_says_so_once(given: str):
    assert (
        resume_command(Path("a.yaml"), [given, "seed=2"]) == "offbeat train a.yaml seed=2 resume_from_checkpoint=true"
    )


def test_a_stopped_run_reports_the_step_of_its_checkpoint(tmp_path: Path):
    config = load_run(QUICKSTART, [f"output_dir={tmp_path}", "max_steps=24"])
    assert describe_stop(config, 2) == "Stopped before the first checkpoint."
    for serial, step in enumerate((20, 7)):  # step 20 is of an earlier attempt that was not resumed
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "learner.json").write_text(json.dumps({"step": step, "lineage": str(serial), "serial": serial}))
    (tmp_path / "checkpoints" / ".writing-step-000009").mkdir()
    message = f"Stopped at step 7 of 24; checkpoint: {tmp_path}/checkpoints/step-000007"
    assert describe_stop(config, 7) == message
    assert describe_stop(config, 9) == f"{message}\nLater steps, up to 9, will be trained again."


async def test_a_resumed_run_names_the_changed_settings_that_it_keeps(tmp_path: Path):
    """The command may name the configured value, to undo a change."""
    rate = "actor_train.training_args.learning_rate=1e-4"
    config = load_run(QUICKSTART, [f"output_dir={tmp_path}", rate, "max_staleness=2"])
    changes = [{"learning_rate": 1e-3, "max_staleness": 1.0}, {"max_staleness": 2.0}]
    settings = config.settings.changed({"learning_rate": 1e-3})
    shown = view(state=RunState.STOPPED).model_copy(
        update={
            "changes": [ChangeView(values=values, at=0.0, from_step=5) for values in changes],
            "settings": SettingsView.of(settings),
        }
    )
    output = io.StringIO()
    command = TrainCommand(config, open_view("lake", Console(file=output, width=200)), "")
    assert await command._watch(FakeClient(shown)) is shown  # pyright: ignore[reportArgumentType]
    kept = "Changed settings are kept: learning_rate=0.001 (configured: 0.0001). `offbeat runs set lake NAME=VALUE`"
    assert kept in output.getvalue()


def test_a_folder_that_can_not_be_had_is_reported_in_a_line():
    command = [sys.executable, "-m", "offbeat.deploy.cli.app", "train", str(QUICKSTART), "output_dir=/dev/null/run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("offbeat: output_dir /dev/null/run can't be used: ")


def test_a_busy_port_is_reported_before_anything_starts(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [sys.executable, "-m", "offbeat.deploy.cli.app", "train", str(QUICKSTART), f"control.port={port}"]
        done = subprocess.run(
            [*command, f"output_dir={tmp_path}/run"], capture_output=True, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"offbeat: control.port: port {port} of 127.0.0.1 is in use by process {os.getpid()} ("
    )
    assert done.stderr.endswith("set another port (control.port=0 takes a free one)\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("has_started", "resumable", "has_checkpoint", "offered"),
    [
        (True, True, True, True),
        (True, True, False, False),
        (True, False, True, False),
        (False, True, True, False),
    ],
)
async def test_a_resume_is_offered_only_where_it_can_help(
    tmp_path: Path, has_started: bool, resumable: bool, has_checkpoint: bool, offered: bool
):
    """Not after a failed start, a failure for good, or without a checkpoint."""
    if has_checkpoint:
        (tmp_path / "checkpoints" / "step-000007").mkdir(parents=True)
    config = load_run(QUICKSTART, [f"output_dir={tmp_path}"])
    output = io.StringIO()
    command = TrainCommand(config, open_view("lake", Console(file=output)), "offbeat train again")
    command._last = view(state=RunState.FAILED).model_copy(update={"resumable": resumable}) if has_started else None
    command._mesh = FakeMesh()  # pyright: ignore[reportAttributeAccessIssue]
    assert await command._end_failed(MeshError("it died")) == 1
    assert "The run failed: it died" in output.getvalue()
    assert ("Resume with: offbeat train again" in output.getvalue()) == offered


async def test_a_refused_command_writes_no_report_of_the_run_that_has_its_name(redis_url: str, tmp_path: Path):
    config = load_run(QUICKSTART, [f"output_dir={tmp_path}"])
    async with connect_async(redis_url) as redis:
        await RunStore(redis, mesh="theirs").create(run_spec(config))
    command = TrainCommand(config, open_view("lake", Console(file=io.StringIO())), "")
    mesh = FakeMesh()
    mesh.redis_url = redis_url
    command._mesh = mesh  # pyright: ignore[reportAttributeAccessIssue]
    for mesh.owns_run in (False, True):
        assert await command._end_failed(MeshError("run 'lake' is running: stop it first")) == 1
        assert (tmp_path / "report.json").exists() == mesh.owns_run


class FakeClient:
    """A control service that has one run."""

    def __init__(self, run: RunView) -> None:
        self._run = run

    async def show(self, _run_id: str) -> RunView:
        return self._run

    async def metrics(self, _run_id: str, *, after: str, limit: int) -> MetricsView:
        assert limit
        return MetricsView(records=[], next=after)


class FakeMesh:
    """A mesh that has stopped."""

    redis_url = "redis://127.0.0.1:1/0"
    owns_run = False

    async def stop(self, outcome: RunState) -> None:
        assert outcome is RunState.FAILED


FAILS = """
import asyncio, subprocess, sys
from pathlib import Path
from offbeat.deploy.config.loader import load_run
from offbeat.deploy.cli.train import TrainCommand, _train

class Mesh:
    def __init__(self):
        self.ray = subprocess.Popen(["sleep", "300"], stdout=subprocess.PIPE)
    def kill(self):
        self.ray.kill()

async def fail(self):
    self._mesh = Mesh()
    supervision = asyncio.create_task(asyncio.to_thread(self._mesh.ray.stdout.read))
    await asyncio.sleep(0.1)
    self._view.print("\u7b54 was sampled")
    raise OSError("no space left")

TrainCommand._run_to_its_end = fail
sys.exit(_train(load_run(Path(sys.argv[1]), [f"output_dir={sys.argv[2]}"]), "", None))
"""


def test_a_bug_ends_the_command_while_a_thread_waits_for_ray(tmp_path: Path):
    """In a terminal that lacks the characters of an answer, too."""
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", FAILS, str(QUICKSTART), str(tmp_path / "run")]
    env = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("\\u7b54 was sampled\noffbeat failed: OSError('no space left')\n")


TALKS = """
import asyncio, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a suite under nohup ignores it, as would the command
from pathlib import Path
from offbeat.deploy.config.loader import load_run
from offbeat.deploy.cli.train import TrainCommand, _train

def record(text):
    with Path(sys.argv[3]).open("a") as log:
        log.write(text + "\\n")

class Mesh:
    redis_url = "redis://127.0.0.1:1/0"
    owns_run = True
    async def stop_learner(self):
        record("stop_learner")
        while not Path(sys.argv[3]).with_name("signalled").exists():
            await asyncio.sleep(0.01)
        return -1
    async def stop(self, outcome):
        record(f"stop {outcome}")
    def kill(self):
        record("kill")

async def talk(self):
    self._mesh = Mesh()
    while True:
        self._view.print("on and on")
        await asyncio.sleep(0.05)

TrainCommand._run_to_its_end = talk
code = _train(load_run(Path(sys.argv[1]), [f"output_dir={sys.argv[2]}"]), "", None)
sys.stdout.flush()
record(f"exit {code}")
"""


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_run_whose_output_is_closed_stops_with_a_checkpoint(tmp_path: Path, is_terminal: bool):
    """As by Ctrl-C: its `tee` has ended, or its terminal was closed, for which shell and kernel send a SIGHUP each."""
    (tmp_path / "run").mkdir()
    log = tmp_path / "log"
    command = [sys.executable, "-c", TALKS, str(QUICKSTART), str(tmp_path / "run"), str(log)]
    reader, writer = pty.openpty() if is_terminal else os.pipe()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer) as talking:
        os.close(writer)
        output = b""
        while b"on and on" not in output:
            output += os.read(reader, 4096)
        os.close(reader)
        if is_terminal:
            talking.send_signal(signal.SIGHUP)
            wait_until_sync(log.exists)
            talking.send_signal(signal.SIGHUP)
        wait_until_sync(log.exists)
        talking.send_signal(signal.SIGTERM)  # the first one that asks for an end
        (tmp_path / "signalled").touch()
        assert talking.wait(60) == 0
    assert log.read_text().splitlines() == ["stop_learner", "stop stopped", "exit 130"]


def test_a_kept_change_is_named_though_the_view_lists_newer_ones_alone(tmp_path: Path):
    config = load_run(QUICKSTART, [f"output_dir={tmp_path}"])
    changes = [ChangeView(values={"num_env_groups": 7.0}, at=0.0, from_step=5)]
    settings = SettingsView.of(config.settings.changed({"num_workers": 3, "num_env_groups": 7}))
    kept = describe_kept_changes(config, view().model_copy(update={"changes": changes, "settings": settings}))
    assert "num_workers=3 (configured: " in kept
    assert "num_env_groups=7 (configured: " in kept
