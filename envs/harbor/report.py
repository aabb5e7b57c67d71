"""What this machine can do with a task."""

from offbeat.envs.harbor.images import ImageBuildError, require_image
from offbeat.envs.harbor.machine import TaskError
from offbeat.envs.harbor.obstacles import find_obstacles
from offbeat.envs.harbor.task import HarborTask, TaskStep
from offbeat.envs.harbor.trial import TaskTrial, TaskVerdict
from offbeat.envs.sandbox import IsolationError
from offbeat.envs.sandbox.network import NetworkError
from offbeat.envs.sandbox.shell import TASK_IMAGE, ShellError, ShellLimits


def describe_task(
    task: HarborTask, *, solve: bool, limits: ShellLimits | None = None, build: bool = False
) -> tuple[bool, str]:
    """Return whether a task runs in a shell, and text.

    solve: also that its solution earns more than doing nothing. limits: with the image of a container, and its network.
    build: pull or build the task's own image, if it is missing.
    """
    limits = limits or ShellLimits()
    if obstacles := find_obstacles(task, image=limits.image, has_network=limits.network != "none"):
        return False, f"needs {'a container of its own' if limits.image else 'a container'}: {'; '.join(obstacles)}"
    try:
        if limits.image == TASK_IMAGE:
            require_image(task, build=build)
        if not solve:
            return True, "runs in a shell"
        before = _do_nothing(task, limits) if len(task.steps) == 1 else None
        trial = TaskTrial(task, limits)
    except (ImageBuildError, IsolationError, NetworkError, OSError, ShellError, TaskError) as error:
        return False, str(error)
    try:
        reports = [_solve(trial, step, before) for step in task.steps]
    except (NetworkError, ShellError, TaskError) as error:
        return False, str(error)
    finally:
        trial.close()
    return all(ok for ok, _ in reports), "; ".join(text for _, text in reports)


def _do_nothing(task: HarborTask, limits: ShellLimits) -> TaskVerdict:
    """Verify a task's only step in a shell of its own, whose verifier may change what the next one starts from."""
    trial = TaskTrial(task, limits)
    try:
        return _verify_untouched(trial, task.steps[0])
    finally:
        trial.close()


def _verify_untouched(trial: TaskTrial, step: TaskStep) -> TaskVerdict:
    trial.begin_step(step)
    return trial.verify(step, step.verifier_timeout_s)


def _solve(trial: TaskTrial, step: TaskStep, before: TaskVerdict | None) -> tuple[bool, str]:
    """before: verdict on doing nothing; None: verify that first."""
    name = f"step {step.name}: " if step.name else ""
    before = before or _verify_untouched(trial, step)
    trial.begin_step(step)
    result = trial.solve(step, step.agent_timeout_s or step.verifier_timeout_s)
    after = trial.verify(step, step.verifier_timeout_s)
    if after.error:
        return False, f"{name}{after.error}; the solution printed {result.output.strip()[-300:]!r}"
    text = f"{name}the solution earns {_format(after.rewards)}, doing nothing {_format(before.rewards)}"
    return sum(after.rewards.values()) > sum(before.rewards.values()), text


def _format(rewards: dict[str, float]) -> str:
    return (
        ", ".join(f"{value:g}" if name == "reward" else f"{name} {value:g}" for name, value in rewards.items()) or "0"
    )
