"""Agents in processes of another Python, which has neither Offbeat nor what it needs."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from offbeat.deploy.config.checks.agents import check_agent
from offbeat.services.awake_clock import AwakeClock
from offbeat.services.errors import EpisodeError
from offbeat.services.process import free_port
from offbeat.services.rollout.agents.pool import AgentOutcome, AgentPool
from offbeat.services.rollout.agents.task import AgentTask
from offbeat.services.rollout.config import AgentRunner
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

PYTHONS = sorted(Path("~/.pyenv/versions").expanduser().glob("*/bin/python"))

MODULE = """
import asyncio, json, os, subprocess, sys, time

calls, inside, most = 0, 0, 0

def reports(task):
    global calls
    calls += 1
    missing = [name for name in ("offbeat", "msgpack", "pydantic") if not importable(name)]
    return {"reward": task.seed, "metrics": {"calls": calls, "pid": os.getpid(), "missing": len(missing),
            "foreign": sys.prefix != os.environ["OFFBEAT_TEST_PREFIX"]}}

def importable(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True

def prints(task):
    print("noise")
    os.write(1, b'{"id": 0, "result": 99}\\n')
    subprocess.run(["echo", "more noise"])
    sys.stdin.read()
    return float(task.seed)

def raises(task):
    raise KeyError("no tool")

def raises_with_child(task):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    raise KeyError(child.pid)

def raises_with_orphan(task):
    raise KeyError(start_orphan())

helper = None

def keeps_helper(task):
    global helper
    helper = helper or start()
    return {"metrics": {"pid": os.getpid(), "helper": helper.pid}}

def keeps_helper_that_starts_processes(task):
    global helper
    script = "while read line; do sleep 1000 & echo $!; done"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    helper = helper or subprocess.Popen(["sh", "-c", script], **pipes)
    print("start", file=helper.stdin, flush=True)
    helper.stdout.readline()
    return {"metrics": {"pid": os.getpid(), "helper": helper.pid}}

SERVER = "import socket, time; s = socket.create_server(('127.0.0.1', %d)); print(1, flush=True); time.sleep(1000)"

def serves(task):
    server = subprocess.Popen([sys.executable, "-c", SERVER % task.seed], stdout=subprocess.PIPE)
    if not server.stdout.readline():
        raise OSError(f"exit status {server.wait()}: the port is in use")
    return {"metrics": {"child": server.pid}}

def leaves(task):
    return {"metrics": {"pid": os.getpid(), "child": start().pid}}

async def leaves_in_coroutine(task):
    return leaves(task)

def leaves_orphan(task):
    return {"metrics": {"pid": os.getpid(), "child": start_orphan()}}

def start_orphan():
    shell = subprocess.run(["sh", "-c", "sleep 1000 >/dev/null & echo $!"], stdout=subprocess.PIPE)
    return int(shell.stdout)

def start():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])

def crashes(task):
    sys.stderr.write("last words\\n")
    os._exit(7)

def returns_no_json(task):
    return object()

def hangs(task):
    time.sleep(1000)

async def cleans_up(task):
    try:
        await asyncio.sleep(1000)
    finally:
        await asyncio.sleep(0.1)
        with open(os.environ["OFFBEAT_TEST_MARKER"], "w") as marker:
            marker.write("cleaned up")

async def starts(task):
    with open(os.environ["OFFBEAT_TEST_MARKER"], "w") as marker:
        marker.write(str(os.getpid()))
    try:
        await asyncio.sleep(1000)
    finally:
        time.sleep(1000)

async def never_ends(task):
    open(os.environ["OFFBEAT_TEST_MARKER"], "w").close()
    try:
        await asyncio.sleep(1000)
    finally:
        with open(os.environ["OFFBEAT_TEST_MARKER"], "w") as marker:
            marker.write("cancelled")
        while True:
            await asyncio.sleep(0.01)

async def waits(task):
    global inside, most
    inside += 1
    most = max(most, inside)
    try:
        while task.seed < 0 or most < 4:
            await asyncio.sleep(0.01)
        if task.seed == 99:
            time.sleep(1000)
    finally:
        inside -= 1
    return {"reward": 1.0, "metrics": {"pid": os.getpid(), "most": most}}
"""


@pytest.fixture(scope="session")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python")


class Agents:
    """A worker's pool, asked for one episode at a time or several."""

    def __init__(self, python: str) -> None:
        self.clock, self._python = AwakeClock(), python
        self.pool = AgentPool(self.clock)

    async def run(self, function: str, seed: int = 1, **changes: Any) -> AgentOutcome:
        runner = AgentRunner(path=f"foreign_agents:{function}", python=self._python, **changes)
        task = AgentTask("http://h/v1", "key", "http://h", "http://h/env", "policy", "Tag", seed, "", "", 3)
        return await self.pool.run(runner, task)

    async def fail(self, function: str, seed: int = 1, **changes: Any) -> EpisodeError:
        with pytest.raises(EpisodeError) as caught:
            await self.run(function, seed, **changes)
        return caught.value


@pytest.fixture
async def agents(other_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "foreign_agents.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("OFFBEAT_TEST_PREFIX", sys.prefix)
    made = Agents(other_python)
    yield made
    await made.pool.close()


async def test_an_agent_stays_in_a_python_without_our_packages(agents: Agents):
    outcomes = [await agents.run("reports", seed) for seed in (3, 4)]
    assert [outcome.reward for outcome in outcomes] == [3.0, 4.0]
    first, second = (outcome.metrics for outcome in outcomes)
    assert (first["missing"], first["foreign"]) == (3.0, 1.0)
    assert (second["calls"], second["pid"]) == (2.0, first["pid"])


async def test_what_an_agent_prints_does_not_reach_the_protocol(agents: Agents, capfd: pytest.CaptureFixture[str]):
    assert (await agents.run("prints", 5)).reward == 5.0
    assert (await agents.run("prints", 6)).reward == 6.0
    await agents.pool.close()
    assert "more noise" in capfd.readouterr().err


@pytest.mark.parametrize("function", ["raises_with_child", "raises_with_orphan"])
async def test_an_exception_leaves_the_process_unless_processes_were_started(agents: Agents, function: str):
    pid = (await agents.run("reports")).metrics["pid"]
    error = await agents.fail("raises")
    assert (error.reason, "no tool" in str(error)) == ("agent_error", True)
    assert 'raise KeyError("no tool")' in error.trace
    assert (await agents.run("reports")).metrics["pid"] == pid
    child = int(str(await agents.fail(function)).rsplit(" ", 1)[1])
    await wait_until(lambda: not is_alive(child))
    assert (await agents.run("reports")).metrics["pid"] != pid


@pytest.mark.parametrize("function", ["leaves", "leaves_in_coroutine", "leaves_orphan"])
async def test_an_agent_that_leaves_processes_again_and_again_is_replaced(agents: Agents, function: str):
    first, second, third = [(await agents.run(function)).metrics for _ in range(3)]
    assert first["pid"] == second["pid"] != third["pid"]
    await wait_until(lambda: not any(is_alive(int(each["child"])) for each in (first, second)))
    assert is_alive(int(third["child"]))


@pytest.mark.parametrize("function", ["keeps_helper", "keeps_helper_that_starts_processes"])
async def test_a_helper_that_an_agent_keeps_stays_with_its_process(agents: Agents, function: str):
    outcomes = [(await agents.run(function)).metrics for _ in range(3)]
    assert outcomes[0] == outcomes[1] == outcomes[2]


async def test_a_failure_ends_what_earlier_episodes_left(agents: Agents):
    """The next episodes of the process would fail in the same way."""
    port = free_port()
    left = (await agents.run("serves", port)).metrics["child"]
    assert "the port is in use" in str(await agents.fail("serves", port))
    await wait_until(lambda: not is_alive(int(left)))
    assert (await agents.run("serves", port)).metrics["child"] != left


@pytest.mark.parametrize(
    ("function", "reason", "says"),
    [
        ("crashes", "agent_crashed", "exit status 7"),
        ("hangs", "agent_timeout", "no answer in 1 s"),
        ("returns_no_json", "agent_result", "which is no JSON"),
        ("nowhere", "agent_error", "has no attribute 'nowhere'"),
    ],
)
async def test_a_failing_agent_is_named_and_the_next_one_runs(agents: Agents, function: str, reason: str, says: str):
    error = await agents.fail(function, timeout_s=1.0 if function == "hangs" else 120.0)
    assert (error.reason, says in str(error)) == (reason, True), str(error)
    assert (await agents.run("reports")).reward == 1.0


async def test_coroutines_share_a_process(agents: Agents):
    episodes = [agents.run("waits", episodes_per_process=4, timeout_s=120.0) for _ in range(4)]
    outcomes = await asyncio.gather(*episodes)
    assert len({outcome.metrics["pid"] for outcome in outcomes}) == 1
    assert max(outcome.metrics["most"] for outcome in outcomes) == 4.0


async def test_a_coroutine_is_cancelled_without_harm_to_others(agents: Agents):
    shared = {"episodes_per_process": 4, "cancel_grace_s": 30.0}
    with agents.clock.stopped():
        others = [asyncio.create_task(agents.run("waits", timeout_s=120.0, **shared)) for _ in range(2)]
        endless = asyncio.create_task(agents.fail("waits", -1, timeout_s=0.01, **shared))
        await wait_for_coroutine(agents)
    assert (await endless).reason == "agent_timeout"
    assert not any(other.done() for other in others)
    outcomes = await asyncio.gather(*others, *(agents.run("waits", timeout_s=120.0, **shared) for _ in range(2)))
    assert len({outcome.metrics["pid"] for outcome in outcomes}) == 1


async def test_a_coroutine_that_blocks_its_process_ends_with_it(agents: Agents):
    shared = {"episodes_per_process": 4}
    await asyncio.gather(*(agents.run("waits", timeout_s=120.0, **shared) for _ in range(4)))
    error = await agents.fail("waits", 99, timeout_s=1.0, **shared)
    assert error.reason == "agent_timeout"
    assert (await agents.run("reports")).metrics["calls"] == 1.0


@pytest.mark.parametrize("ends", ["timeout", "cancelled"])
async def test_a_coroutine_alone_in_its_process_cleans_up_before_it_is_killed(
    agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
):
    marker = tmp_path / "marker"
    monkeypatch.setenv("OFFBEAT_TEST_MARKER", str(marker))
    before = children()
    with agents.clock.stopped():
        running = asyncio.create_task(agents.run("cleans_up", timeout_s=0.01, cancel_grace_s=30.0))
        await wait_for_coroutine(agents)
        if ends == "cancelled":
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
    if ends == "timeout":
        with pytest.raises(EpisodeError, match="agent_timeout"):
            await running
    assert marker.read_text() == "cleaned up"
    assert children() <= before


async def test_a_coroutine_that_does_not_clean_up_in_time_is_killed(
    agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    marker = tmp_path / "marker"
    monkeypatch.setenv("OFFBEAT_TEST_MARKER", str(marker))
    with agents.clock.stopped():
        failing = asyncio.create_task(agents.fail("starts", timeout_s=0.01, cancel_grace_s=0.2))
        await wait_until(lambda: marker.exists() and marker.read_text() != "")
    assert (await failing).reason == "agent_timeout"
    assert not is_alive(int(marker.read_text()))


@pytest.mark.parametrize("first", ["timeout", "cancelled"])
async def test_an_agent_has_ended_although_its_episode_is_cancelled_again(
    agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
):
    """Its process would be free for the next episode, or stay."""
    marker, before = tmp_path / "marker", children()
    monkeypatch.setenv("OFFBEAT_TEST_MARKER", str(marker))
    timeout_s = 0.01 if first == "timeout" else 300.0
    with agents.clock.stopped():
        running = asyncio.create_task(agents.run("never_ends", timeout_s=timeout_s))
        await wait_until(marker.exists)
    if first == "cancelled":
        running.cancel()
    await wait_until(lambda: marker.read_text() == "cancelled")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert children() <= before
    assert agents.pool._processes["Tag"] == []


async def test_a_plain_function_can_not_share_a_process(agents: Agents):
    error = await agents.fail("reports", episodes_per_process=2)
    assert "needs a coroutine function" in str(error)


async def test_a_cancelled_episode_of_a_plain_function_leaves_no_process(agents: Agents):
    before = children()
    running = asyncio.create_task(agents.run("hangs", cancel_grace_s=1000.0))
    await wait_until(lambda: bool(children() - before))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert children() <= before


@pytest.mark.usefixtures("agents")
def test_an_interpreter_is_checked_before_the_start(other_python: str):
    def problems(**changes: Any) -> dict[str, str]:
        runner = AgentRunner(**{"path": "foreign_agents:reports", "python": other_python, **changes})
        return {
            issue.path.removeprefix("custom_envs.T.agent_runner."): issue.message for issue in check_agent("T", runner)
        }

    assert problems() == {}
    assert "no program '/nowhere'" in problems(python="/nowhere")["python"]
    assert "has no module 'nothing'" in problems(path="nothing:at_all")["python"]
    assert "can't find module 'nothing.here'" in problems(path="nothing.here:at_all")["python"]
    assert problems(python="", episodes_per_process=2).keys() == {"episodes_per_process"}
    changes_of_path: list[dict[str, Any]] = [{"python": other_python}, {"cancel_grace_s": 5.0}]
    for only_of_path in changes_of_path:
        with pytest.raises(ValidationError, match="a command is a process per episode"):
            AgentRunner(command=("x",), **only_of_path)


@pytest.mark.parametrize("version", ["3.10", "3.13"])
@pytest.mark.usefixtures("agents")
async def test_the_runner_works_in_other_versions_of_python(version: str):
    found = [str(path) for path in PYTHONS if path.parents[1].name.startswith(f"{version}.")]
    if not found:
        pytest.skip(f"no Python {version} is installed")
    other = Agents(found[0])
    try:
        assert (await other.run("reports", 2)).metrics["foreign"] == 1.0
        await other.pool.close()
        episodes = (other.run("waits", episodes_per_process=4, timeout_s=120.0) for _ in range(4))
        assert len({outcome.metrics["pid"] for outcome in await asyncio.gather(*episodes)}) == 1
    finally:
        await other.pool.close()


async def wait_for_coroutine(agents: Agents) -> None:
    """Wait until an agent's process runs a coroutine, which a cancellation reaches."""
    await wait_until(lambda: any(process.can_cancel for process in agents.pool._processes["Tag"]))


def children() -> set[int]:
    text = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()
    return {int(child) for child in text.split()}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it is reaped between opening and reading
        return False
