"""SWE-ReX's requests on the kernel sandbox."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from swerex.exceptions import (
    CommandTimeoutError,
    DeploymentNotStartedError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
)
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    UploadRequest,
    WriteFileRequest,
)

from offbeat.deploy.sandboxes.swe_rex import SandboxDeployment, SandboxRuntime
from offbeat.envs.sandbox.shell import ShellLimits
from tests.envs.sandbox.test_shell import needs_shell

pytestmark = needs_shell


@pytest.fixture
async def runtime() -> AsyncIterator[SandboxRuntime]:
    deployment = SandboxDeployment()
    await deployment.start()
    assert await deployment.is_alive()
    yield deployment.runtime
    await deployment.stop()
    assert not await deployment.is_alive()
    with pytest.raises(DeploymentNotStartedError):
        _ = deployment.runtime


def test_a_network_is_refused():
    with pytest.raises(ValueError, match=r"limits\.network: this deployment has no network"):
        SandboxDeployment(limits=ShellLimits(image="ubuntu", network="task"))


ACTIONS = {
    "cd /tmp; X=1; export Y=two; f() { echo f$1; }": "",
    "echo $X $Y; f 3": "1 two\nf3",
    "mkdir -p d && cd d && touch file": "",
    "ls; basename $PWD": "file\nd",
    "printf 'no newline'": "no newline",
    "echo out; echo err >&2": "out\nerr",
    "trap 'echo bye' EXIT; cd /tmp; code=7": "",
    "echo $code; pwd": "7\n/tmp",
}
"""Answers of `LocalDeployment`, but for its terminal's empty lines; its time limits of .1 s fail on a busy machine."""


async def test_a_session_answers_as_swe_rexs_own(runtime: SandboxRuntime):
    await runtime.create_session(CreateBashSessionRequest())
    results = [await runtime.run_in_session(BashAction(command=command)) for command in ACTIONS]
    assert [result.output for result in results] == list(ACTIONS.values())
    assert {result.exit_code for result in results} == {0}
    with pytest.raises(NonZeroExitCodeError):
        await runtime.run_in_session(BashAction(command="false"))
    assert (await runtime.run_in_session(BashAction(command="(exit 3)", check="silent"))).exit_code == 3
    with pytest.raises(SessionExistsError):
        await runtime.create_session(CreateBashSessionRequest())
    await runtime.close_session(CloseBashSessionRequest())
    with pytest.raises(SessionDoesNotExistError):
        await runtime.run_in_session(BashAction(command="true"))


async def test_commands_and_files(runtime: SandboxRuntime, tmp_path: Path):
    (tmp_path / "given").mkdir()
    (tmp_path / "given/a.txt").write_text("text")
    await runtime.upload(UploadRequest(source_path=str(tmp_path / "given"), target_path="/data/given"))
    await runtime.write_file(WriteFileRequest(path="/app/b.txt", content="übung"))
    assert (await runtime.read_file(ReadFileRequest(path="/data/given/a.txt"))).content == "text"
    assert (await runtime.read_file(ReadFileRequest(path="/app/b.txt", encoding="utf-8"))).content == "übung"
    with pytest.raises(FileNotFoundError):
        await runtime.read_file(ReadFileRequest(path="/app/c.txt"))
    done = await runtime.execute(Command(command=["sh", "-c", "pwd; echo wrong >&2; exit 2"], cwd="/data"))
    assert (done.stdout, done.stderr, done.exit_code) == ("/data\n", "wrong\n", 2)
    done = await runtime.execute(Command(command="echo $A", shell=True, env={"A": "b"}, merge_output_streams=True))
    assert (done.stdout, done.stderr, done.exit_code) == ("b\n", "", 0)
    with pytest.raises(NonZeroExitCodeError, match="no such"):
        await runtime.execute(Command(command=["false"], check=True, error_msg="no such"))


async def test_long_output_and_a_text_without_a_shell(runtime: SandboxRuntime):
    done = await runtime.execute(Command(command="seq 1 20000", shell=True))
    assert done.stdout == "".join(f"{number}\n" for number in range(1, 20_001))
    assert (await runtime.execute(Command(command="pwd"))).stdout == "/app\n"


async def test_a_file_that_is_too_large_is_refused_and_the_shell_survives(runtime: SandboxRuntime):
    await runtime.execute(
        Command(command="head -c 60M /dev/zero > /app/large; head -c 32M /app/large > /app/b", shell=True)
    )
    with pytest.raises(ValueError, match="/app/large has more than 32 MiB: read parts of it"):
        await runtime.read_file(ReadFileRequest(path="/app/large"))
    assert len((await runtime.read_file(ReadFileRequest(path="/app/b"))).content) == 32 << 20


async def test_a_command_over_its_timeout_is_killed_and_the_session_survives(runtime: SandboxRuntime):
    await runtime.create_session(CreateBashSessionRequest())
    with pytest.raises(CommandTimeoutError):
        await runtime.run_in_session(BashAction(command="sleep 600", timeout=0.3))
    await runtime.run_in_session(BashInterruptAction())
    assert (await runtime.run_in_session(BashAction(command="echo on"))).output == "on"
    with pytest.raises(NotImplementedError, match="no terminal"):
        await runtime.run_in_session(BashAction(command="python3", is_interactive_command=True))
