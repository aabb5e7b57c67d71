"""SWE-ReX's interface (swe-rex 1.4) on the kernel sandbox, for agents written for it, such as SWE-agent.

In place of `LocalDeployment`, which runs commands on the machine itself. A session keeps folder, variables and functions
between commands, but is no terminal: interactive programs are refused, and a command that runs out of time is killed.
"""

import asyncio
import logging
import shlex
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import uuid4

from offbeat.envs.harbor.machine import FOLDERS
from offbeat.envs.harbor.task import read_files
from offbeat.envs.optional_imports import require
from offbeat.envs.sandbox.backend import AnyShell, open_shell
from offbeat.envs.sandbox.shell import CommandResult, ShellError, ShellLimits, UploadedFile

AbstractDeployment: Any = require("swerex.deployment.abstract", "swe-rex").AbstractDeployment
hooks: Any = require("swerex.deployment.hooks.abstract", "swe-rex")
abstract: Any = require("swerex.runtime.abstract", "swe-rex")
exceptions: Any = require("swerex.exceptions", "swe-rex")

DEFAULT_TIMEOUT_S = 3600.0
MAX_FILE_BYTES = 32 << 20
"""Of a file that is read; the shell sends it in one reply."""
MAX_OUTPUT_CHARS = 1_000_000
SAVE = "__offbeat_code=$?; pwd > {state}.cwd; {{ declare -p; declare -f; }} > {state}.vars"
"""A command ends by `exit`, or may have set a trap of its own: state is saved in both cases."""
SESSION = f"""
trap '{SAVE}; exit $__offbeat_code' EXIT
source {{state}}.vars 2> /dev/null
cd "$(cat {{state}}.cwd)"
eval {{command}}
{SAVE}
trap - EXIT
exit $__offbeat_code
"""


class SandboxDeployment(AbstractDeployment):
    def __init__(
        self,
        *,
        limits: ShellLimits | None = None,
        folders: tuple[str, ...] = FOLDERS,
        logger: logging.Logger | None = None,
    ) -> None:
        """folders: writable ones."""
        self.logger = logger or logging.getLogger(__name__)
        self._limits, self._folders = limits or ShellLimits(max_output_chars=MAX_OUTPUT_CHARS), folders
        if self._limits.network != "none":
            raise ValueError("limits.network: this deployment has no network; tasks of `env_type: harbor` can have one")
        self._runtime: SandboxRuntime | None = None
        self._hooks = hooks.CombinedDeploymentHook()

    def add_hook(self, hook: Any) -> None:
        self._hooks.add_hook(hook)

    async def is_alive(self, *, timeout: float | None = None) -> Any:
        if self._runtime is None:
            return abstract.IsAliveResponse(is_alive=False, message="not started")
        return await self._runtime.is_alive(timeout=timeout)

    async def start(self) -> None:
        shell = await asyncio.to_thread(open_shell, self._folders, self._limits)
        self._runtime = SandboxRuntime(shell, self.logger)

    async def stop(self) -> None:
        if self._runtime is not None:
            await self._runtime.close()
            self._runtime = None

    @property
    def runtime(self) -> "SandboxRuntime":
        """Raises swerex's DeploymentNotStartedError before `start`."""
        if self._runtime is None:
            raise exceptions.DeploymentNotStartedError
        return self._runtime


class SandboxRuntime(abstract.AbstractRuntime):
    def __init__(self, shell: AnyShell, logger: logging.Logger) -> None:
        self.logger = logger
        self._shell = shell
        self._sessions: set[str] = set()

    async def is_alive(self, *, timeout: float | None = None) -> Any:
        try:
            await self._run(("true",), timeout or 10.0)
        except ShellError as error:
            return abstract.IsAliveResponse(is_alive=False, message=str(error))
        return abstract.IsAliveResponse(is_alive=True)

    async def create_session(self, request: Any) -> Any:
        """Raises swerex's SessionExistsError."""
        if request.session in self._sessions:
            raise exceptions.SessionExistsError(f"session {request.session} already exists")
        cwd = UploadedFile(b"/app\n")
        await asyncio.to_thread(self._shell.upload, "/sandbox", {f"{_state_name(request.session)}.cwd": cwd})
        self._sessions.add(request.session)
        sources = " && ".join(f"source {shlex.quote(path)}" for path in request.startup_source)
        output = (await self._in_session(request.session, sources, None)).output if sources else ""
        return abstract.CreateBashSessionResponse(output=output)

    async def run_in_session(self, action: Any) -> Any:
        """Raises swerex's errors: no such session, out of time, exit code, and NotImplementedError for a terminal."""
        self._check_session(action.session)
        if action.action_type == "bash_interrupt":  # nothing is left running
            return abstract.BashObservation(exit_code=0)
        if action.is_interactive_command or action.is_interactive_quit or action.expect:
            raise NotImplementedError("the sandbox has no terminal: interactive programs and `expect` do not run in it")
        result = await self._in_session(action.session, action.command, action.timeout)
        _check_time(action.command, result, action.timeout)
        if action.check == "raise" and result.exit_code:
            raise exceptions.NonZeroExitCodeError(_failure(action, result.exit_code, result.output))
        exit_code = None if action.check == "ignore" else result.exit_code
        return abstract.BashObservation(output=result.output.removesuffix("\n"), exit_code=exit_code)

    async def close_session(self, request: Any) -> Any:
        """Raises swerex's SessionDoesNotExistError."""
        self._check_session(request.session)
        self._sessions.remove(request.session)
        return abstract.CloseBashSessionResponse()

    async def execute(self, command: Any) -> Any:
        """Raises swerex's errors: out of time, exit code."""
        words = (command.command,) if isinstance(command.command, str) else tuple(command.command)
        if command.shell:
            words = ("bash", "-c", command.command)
        errors = "" if command.merge_output_streams else f"/sandbox/.stderr-{uuid4().hex}"
        if errors:
            words = ("bash", "-c", f'"$@" 2> {errors}', "bash", *words)
        result = await self._run(words, command.timeout, command.cwd or "/app", command.env)
        _check_time(command.command, result, command.timeout)
        stderr = await asyncio.to_thread(self._read, errors) if errors else b""
        if command.check and result.exit_code:
            text = result.output + stderr.decode(errors="replace")
            raise exceptions.NonZeroExitCodeError(_failure(command, result.exit_code, text))
        return abstract.CommandResponse(
            stdout=result.output, stderr=stderr.decode(errors="replace"), exit_code=result.exit_code
        )

    async def read_file(self, request: Any) -> Any:
        """Raises FileNotFoundError, ValueError for a file beyond `MAX_FILE_BYTES`."""
        content = await asyncio.to_thread(self._read, request.path, MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"{request.path} has more than {MAX_FILE_BYTES >> 20} MiB: read parts of it by `execute`")
        return abstract.ReadFileResponse(
            content=content.decode(request.encoding or "utf-8", errors=request.errors or "strict")
        )

    async def write_file(self, request: Any) -> Any:
        path = PurePosixPath(request.path)
        file = {path.name: UploadedFile(request.content.encode())}
        await asyncio.to_thread(self._shell.upload, str(path.parent), file)
        return abstract.WriteFileResponse()

    async def upload(self, request: Any) -> Any:
        await asyncio.to_thread(self._upload, Path(request.source_path), PurePosixPath(request.target_path))
        return abstract.UploadResponse()

    async def close(self) -> Any:
        await asyncio.to_thread(self._shell.close)
        return abstract.CloseResponse()

    async def _in_session(self, session: str, command: str, timeout_s: float | None) -> CommandResult:
        state = f"/sandbox/{_state_name(session)}"
        return await self._run(("bash", "-c", SESSION.format(state=state, command=shlex.quote(command))), timeout_s)

    async def _run(
        self, words: tuple[str, ...], timeout_s: float | None, cwd: str = "/app", env: dict[str, str] | None = None
    ) -> CommandResult:
        variables = self._shell.command_env() | {"HOME": "/root"} if env is None else env
        return await asyncio.to_thread(
            self._shell.run, words, cwd=cwd, env=variables, timeout_s=timeout_s or DEFAULT_TIMEOUT_S
        )

    def _read(self, path: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        content = self._shell.read(path, max_bytes)
        if content is None:
            raise FileNotFoundError(path)
        return content

    def _upload(self, source: Path, target: PurePosixPath) -> None:
        if source.is_dir():
            self._shell.upload(str(target), read_files(source))
        else:
            self._shell.upload(str(target.parent), {target.name: UploadedFile.of(source)})

    def _check_session(self, session: str) -> None:
        if session not in self._sessions:
            raise exceptions.SessionDoesNotExistError(f"session {session!r} does not exist")


def _state_name(session: str) -> str:
    return f".session-{session.encode().hex()}"


def _check_time(command: Any, result: CommandResult, timeout_s: float | None) -> None:
    if result.timed_out:
        raise exceptions.CommandTimeoutError(f"timeout ({timeout_s}s) exceeded while running {command!r}")


def _failure(request: Any, exit_code: int, output: str) -> str:
    text = f"Command {request.command!r} failed with exit code {exit_code}. Here is the output:\n{output!r}"
    return f"{request.error_msg}: {text}" if request.error_msg else text
