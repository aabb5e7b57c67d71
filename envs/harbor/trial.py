"""A task played in a shell: set up, commands, verification.

Invariants: what the policy started is dead, and what it put or linked at the verifier's paths is gone, before the
verifier's files arrive; the verifier gets none of the policy's variables or home.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.envs.harbor.dockerfile import BuildCommand, BuildCopy, read_dockerfile
from offbeat.envs.harbor.obstacles import resolve
from offbeat.envs.harbor.task import HarborTask, TaskStep, read_files
from offbeat.envs.sandbox.shell import (
    HOME,
    CommandResult,
    Shell,
    ShellError,
    ShellLimits,
    UploadedFile,
    command_env,
)

TESTS, SOLUTION, LOGS = "/tests", "/solution", "/logs"
VERIFIER_LOGS = "/logs/verifier"
FOLDERS = (
    "/app",
    "/data",
    "/home",
    LOGS,
    "/mnt",
    "/opt",
    "/root",
    SOLUTION,
    "/srv",
    TESTS,
    "/tmp",
    "/var",
    "/workspace",
)
"""Writable ones of each task, besides those of its Dockerfile."""
SETUP_TIMEOUT_S = 60.0
"""Of one command of a Dockerfile, or of a step's `setup.sh`."""


class TaskError(RuntimeError):
    """A task whose set-up fails here."""


class TaskVerdict(NamedTuple):
    rewards: dict[str, float]
    error: str = ""
    """Why the verifier left no reward."""


class TaskTrial:
    def __init__(self, task: HarborTask, limits: ShellLimits) -> None:
        """Raises TaskError if a command of the Dockerfile fails, and as `Shell`."""
        self.task = task
        self._build = read_dockerfile(task.dockerfile)
        self.workdir = task.file.environment.workdir or self._build.workdir
        workdir = () if self.workdir == "/" else (f"/{Path(self.workdir).parts[1]}",)
        self._folders = tuple(dict.fromkeys((*FOLDERS, *self._build.folders, *workdir)))
        self.shell = Shell(self._folders, limits)
        try:
            self._set_up()
        except (ShellError, TaskError) as error:
            self.close()
            raise TaskError(f"{task.folder}: {error}") from error

    def begin_step(self, step: TaskStep) -> None:
        """Remove the last verifier, add the step's files."""
        for folder in (TESTS, VERIFIER_LOGS):
            self.shell.clear(folder)
        if step.workdir is not None:
            self.shell.upload(self.workdir, read_files(step.workdir))
            if (step.workdir / "setup.sh").is_file():
                self._must(("bash", f"{self.workdir}/setup.sh"), f"{step.name}/setup.sh")

    def run(self, command: str, timeout_s: float) -> CommandResult:
        """Run a line of the policy's in bash; raises ShellError."""
        return self.shell.run(("bash", "-c", command), cwd=self.workdir, env=self._env(), timeout_s=timeout_s)

    def solve(self, step: TaskStep, timeout_s: float) -> CommandResult:
        """Run the task's own solution, which is removed again."""
        self.shell.upload(SOLUTION, read_files(step.solution))
        env = self._env() | resolve(self.task.file.solution.env)
        try:
            return self.shell.run(("bash", f"{SOLUTION}/solve.sh"), cwd=self.workdir, env=env, timeout_s=timeout_s)
        finally:
            self.shell.clear(SOLUTION)

    def verify(self, step: TaskStep, timeout_s: float) -> TaskVerdict:
        """Run the verifier; a failure, which the policy may have caused, is part of the verdict."""
        try:
            self._prepare_verifier(step)
            env = command_env() | resolve(self.task.file.environment.env | step.verifier_env)
            result = self.shell.run(("bash", f"{TESTS}/test.sh"), cwd=self.workdir, env=env, timeout_s=timeout_s)
            self.shell.kill_processes()
            return read_verdict(self.shell, result)
        except ShellError as error:
            return TaskVerdict({}, str(error))

    def close(self) -> None:
        self.shell.close()

    def _prepare_verifier(self, step: TaskStep) -> None:
        self.shell.kill_processes()
        for folder in (TESTS, SOLUTION, VERIFIER_LOGS, HOME):
            self.shell.clear(folder)
        self.shell.unlink_to(self._folders, (TESTS, VERIFIER_LOGS))
        for folder in step.tests:
            self.shell.upload(TESTS, read_files(folder))

    def _set_up(self) -> None:
        self.shell.upload(self.workdir, {})
        for folder in (VERIFIER_LOGS, "/logs/agent", "/logs/artifacts"):
            self.shell.clear(folder)
        for action in self._build.actions:
            if isinstance(action, BuildCommand):
                self._must(action.command, f"RUN {action.command[-1]}", action.workdir, action.env)
            else:
                self._copy(action)

    def _copy(self, action: BuildCopy) -> None:
        for source in action.sources:
            if source.is_dir():
                self.shell.upload(action.target.rstrip("/") or "/", _with_mode(read_files(source), action.mode))
                continue
            target = Path(action.target) / source.name if action.target.endswith("/") else Path(action.target)
            file = UploadedFile(source.read_bytes(), source.stat().st_mode & 0o777)
            self.shell.upload(str(target.parent), _with_mode({target.name: file}, action.mode))

    def _must(
        self, command: tuple[str, ...], name: str, workdir: str | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.shell.upload(workdir or self.workdir, {})
        result = self.shell.run(
            command, cwd=workdir or self.workdir, env=self._env() | dict(env or {}), timeout_s=SETUP_TIMEOUT_S
        )
        if result.exit_code:
            raise TaskError(f"{name} failed here with exit code {result.exit_code}: {result.output.strip()[-500:]}")

    def _env(self) -> dict[str, str]:
        return command_env() | {"HOME": "/root"} | self._build.env | resolve(self.task.file.environment.env)


def read_verdict(shell: Shell, result: CommandResult) -> TaskVerdict:
    """Read the verifier's reward.json, else its reward.txt, by Harbor's rules; raises ShellError."""
    if result.timed_out:
        return TaskVerdict({}, "the verifier took too long")
    text, name = shell.read(f"{VERIFIER_LOGS}/reward.json"), "reward.json"
    if text is None:
        text, name = shell.read(f"{VERIFIER_LOGS}/reward.txt"), "reward.txt"
    if text is None:
        end = f"exit code {result.exit_code}: {result.output.strip()[-500:]}"
        return TaskVerdict({}, f"the verifier wrote neither reward.txt nor reward.json ({end})")
    try:
        return TaskVerdict(parse_rewards(text.decode(), is_json=name == "reward.json"))
    except ValueError as error:
        return TaskVerdict({}, f"{name}: {error}")


def parse_rewards(text: str, *, is_json: bool) -> dict[str, float]:
    """Raises ValueError unless all rewards are finite numbers."""
    values: Any = json.loads(text) if is_json else float(text)
    rewards: dict[Any, Any] = values if isinstance(values, dict) else {"reward": values}
    for name, value in rewards.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}, not a finite number")
    return {str(name): float(value) for name, value in rewards.items()}


def _with_mode(files: Mapping[str, UploadedFile], mode: int | None) -> dict[str, UploadedFile]:
    return {
        name: file if mode is None or file.content is None else file._replace(mode=mode) for name, file in files.items()
    }
