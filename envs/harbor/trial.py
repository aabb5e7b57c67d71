"""A task played on its machine: commands, then verification.

Invariant: the verifier's files arrive on a protected machine, and it gets none of the policy's variables or home.
"""

import json
import math
from typing import Any, NamedTuple, cast

from offbeat.envs.harbor.machine import SOLUTION, TESTS, VERIFIER_LOGS, TaskError, TaskMachine
from offbeat.envs.harbor.obstacles import resolve
from offbeat.envs.harbor.task import HarborTask, TaskStep, read_files
from offbeat.envs.harbor.task_set import OWN_TASKS
from offbeat.envs.sandbox.backend import AnyShell
from offbeat.envs.sandbox.container import ContainerShell
from offbeat.envs.sandbox.network import ContainerNetwork, check_network
from offbeat.envs.sandbox.shell import CommandResult, ShellError, ShellLimits


class TaskVerdict(NamedTuple):
    rewards: dict[str, float]
    error: str = ""
    """Why the verifier left no reward."""


class TaskTrial:
    def __init__(self, task: HarborTask, limits: ShellLimits) -> None:
        """Raises TaskError, and IsolationError, as `TaskMachine`."""
        self.task = task
        self._limits = limits
        self._network: ContainerNetwork | None = None
        section, folder = task.file.environment, task.folder.resolve()
        hidden = own_tasks if (own_tasks := OWN_TASKS.resolve()) in folder.parents else folder
        try:
            self.machine = TaskMachine(
                hidden,
                folder / "environment",
                limits,
                docker_image=section.docker_image,
                workdir=section.workdir,
                env=resolve(section.env),
            )
        except TaskError as error:
            raise TaskError(f"{task.folder}: {error}") from error

    def begin_step(self, step: TaskStep) -> None:
        """Remove the last verifier, add the step's files; raises TaskError, ShellError, NetworkError."""
        self.machine.shell.clear(TESTS, VERIFIER_LOGS)
        if self._limits.network == "task" and step.agent_network == "public":
            self._connect()
        if step.workdir is not None:
            self.machine.shell.upload(self.machine.workdir, read_files(step.workdir))
            if (step.workdir / "setup.sh").is_file():
                self.machine.run_or_fail(("bash", f"{self.machine.workdir}/setup.sh"), f"{step.name}/setup.sh")

    def run(self, command: str, timeout_s: float) -> CommandResult:
        """Run a command of the policy's in bash; raises ShellError."""
        return self.machine.run(("bash", "-c", command), timeout_s)

    def solve(self, step: TaskStep, timeout_s: float) -> CommandResult:
        """Run the task's own solution, which is removed again; raises ShellError."""
        self.machine.shell.upload(SOLUTION, read_files(step.solution))
        try:
            env = resolve(self.task.file.solution.env)
            return self.machine.run(("bash", f"{SOLUTION}/solve.sh"), timeout_s, env=env)
        finally:
            self.machine.shell.clear(SOLUTION)

    def verify(self, step: TaskStep, timeout_s: float) -> TaskVerdict:
        """Run the verifier; a failure, which the policy may have caused, is part of the verdict.

        Raises:
            NetworkError: the verifier has a network, and hosts can't be reached before or after it.
        """
        shell = self.machine.shell
        env = shell.verifier_env() | resolve(self.task.file.environment.env | step.verifier_env)
        self._disconnect()
        try:
            self.machine.protect()
            if self._limits.network != "none" and step.verifier_network == "public":
                self._connect()
            for folder in step.tests:
                shell.upload(TESTS, read_files(folder))
            script = (shell.bash, f"{TESTS}/test.sh")
            result = shell.run(script, cwd=self.machine.workdir, env=env, timeout_s=timeout_s)
            shell.kill_processes()
            verdict = read_verdict(shell, result)
        except ShellError as error:
            verdict = TaskVerdict({}, str(error))
        if self._network is not None:
            self._disconnect()
            check_network(self._limits)
        return verdict

    def close(self) -> None:
        self._disconnect()
        self.machine.shell.close()

    def _connect(self) -> None:
        assert isinstance(self.machine.shell, ContainerShell)
        self._network = self.machine.shell.connect()

    def _disconnect(self) -> None:
        if self._network is not None:
            self._network.close()
            self._network = None


def read_verdict(shell: AnyShell, result: CommandResult) -> TaskVerdict:
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
    """Parse a reward file; raises ValueError unless all rewards are finite numbers."""
    values: Any = json.loads(text) if is_json else float(text)
    rewards = cast(dict[Any, Any], values) if isinstance(values, dict) else {"reward": values}
    for name, value in rewards.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}, not a finite number")
    return {str(name): float(value) for name, value in rewards.items()}
