"""A shell in place of a task's container: its folders, variables and files.

Invariants: the shell can't read the hidden folder, also within Python's. After `protect`, what the policy started is
dead, and what it put or linked at the verifier's paths is gone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from offbeat.envs.harbor.dockerfile import BuildCommand, BuildCopy, read_dockerfile
from offbeat.envs.harbor.images import image_build, name_image
from offbeat.envs.harbor.task import read_files
from offbeat.envs.sandbox.backend import open_shell
from offbeat.envs.sandbox.container_engine import find_image
from offbeat.envs.sandbox.shell import HOME, TASK_IMAGE, CommandResult, ShellError, ShellLimits, UploadedFile

TESTS, SOLUTION, LOGS = "/tests", "/solution", "/logs"
VERIFIER_LOGS = "/logs/verifier"
OTHER_LOGS = ("/logs/agent", "/logs/artifacts")
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
OF_VERIFIERS = (TESTS, SOLUTION, LOGS)
"""Folders in memory where the image is writable."""
SETUP_TIMEOUT_S = 60.0
"""Of one command of a Dockerfile, or of a step's `setup.sh`."""


class TaskError(RuntimeError):
    """A task whose set-up fails here."""


class TaskMachine:
    def __init__(
        self,
        hidden: Path,
        environment: Path,
        limits: ShellLimits,
        *,
        docker_image: str | None,
        workdir: str | None,
        env: Mapping[str, str],
    ) -> None:
        """hidden: folder that the shell can't read. environment: folder of the Dockerfile. docker_image: in its place, with
        `image: task`. workdir: in place of the image's. env: of commands, besides the image's.

        Raises:
            TaskError: a command of the Dockerfile fails.
            IsolationError: this machine can't isolate a shell, or lacks the image.
            ShellError: it did not start.
        """
        if own_image := limits.image == TASK_IMAGE:
            limits = limits.model_copy(update={"image": name_image(docker_image, environment)})
        self._build = image_build(find_image(limits)) if own_image else read_dockerfile(environment / "Dockerfile")
        self.workdir = workdir or self._build.workdir
        own = () if self.workdir == "/" else (f"/{Path(self.workdir).parts[1]}",)
        self._folders = OF_VERIFIERS if own_image else tuple(dict.fromkeys((*FOLDERS, *self._build.folders, *own)))
        self.shell = open_shell(self._folders, limits, hidden=(str(hidden),), writable=own_image)
        self.env = self.shell.command_env() | {"HOME": "/root"} | self._build.env | dict(env)
        try:
            self._set_up()
        except (OSError, ShellError, TaskError) as error:
            self.shell.close()
            raise TaskError(str(error)) from error

    def run(
        self,
        words: Sequence[str],
        timeout_s: float,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run a command; raises ShellError. env: besides the machine's."""
        variables = self.env | dict(env or {})
        return self.shell.run(words, cwd=cwd or self.workdir, env=variables, timeout_s=timeout_s)

    def run_or_fail(
        self, words: Sequence[str], name: str, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        """Run a command of the task's; raises TaskError unless it exits with 0."""
        self.shell.upload(cwd or self.workdir, {})
        result = self.run(words, SETUP_TIMEOUT_S, cwd=cwd, env=env)
        if result.exit_code:
            raise TaskError(f"{name} failed here with exit code {result.exit_code}: {result.output.strip()[-500:]}")

    def protect(self) -> None:
        """End the policy's processes, clear the verifier's folders and remove links to them; raises ShellError."""
        self.shell.secure()
        self.shell.clear(TESTS, SOLUTION, VERIFIER_LOGS, HOME)
        self.shell.unlink_to(self._folders, (TESTS, VERIFIER_LOGS))
        for folder in OTHER_LOGS:  # which a writable container has lost
            self.shell.upload(folder, {})

    def _set_up(self) -> None:
        self.shell.upload(self.workdir, {})
        self.shell.clear(VERIFIER_LOGS, *OTHER_LOGS)
        for action in self._build.actions:
            if isinstance(action, BuildCommand):
                self.run_or_fail(action.command, f"RUN {action.command[-1]}", cwd=action.workdir, env=action.env)
            else:
                self._copy(action)

    def _copy(self, action: BuildCopy) -> None:
        for source in action.sources:
            if source.is_dir():
                self.shell.upload(action.target.rstrip("/") or "/", _with_mode(read_files(source), action.mode))
                continue
            target = Path(action.target) / source.name if action.target.endswith("/") else Path(action.target)
            self.shell.upload(str(target.parent), _with_mode({target.name: UploadedFile.of(source)}, action.mode))


def _with_mode(files: Mapping[str, UploadedFile], mode: int | None) -> dict[str, UploadedFile]:
    return {
        name: file if mode is None or file.content is None else file._replace(mode=mode) for name, file in files.items()
    }
