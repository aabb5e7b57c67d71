"""What this machine can do with a task."""

from offbeat.envs.harbor.images import ImageBuildError, require_image
from offbeat.envs.harbor.machine import TaskError
from offbeat.envs.harbor.obstacles import find_obstacles
from offbeat.envs.harbor.task import HarborTask, TaskStep
from offbeat.envs.harbor.trial import TaskTrial
from offbeat.envs.sandbox import IsolationError
from offbeat.envs.sandbox.shell import TASK_IMAGE, ShellError, ShellLimits


def describe_task(task: HarborTask, *, solve: bool, image: str | None = None, build: bool = False) -> tuple[bool, str]:
    """Return whether a task runs in a shell, and text.

    solve: also that its solution earns more than doing nothing. image: run it in a container of this image, or its own.
    build: pull or build its own, if it is missing.
    """
    if obstacles := find_obstacles(task, image=image):
        return False, f"needs {'a container of its own' if image else 'a container'}: {'; '.join(obstacles)}"
    try:
        if image == TASK_IMAGE:
            require_image(task, build=build)
        if not solve:
            return True, "runs in a shell"
        trial = TaskTrial(task, ShellLimits(image=image))
    except (ImageBuildError, IsolationError, OSError, ShellError, TaskError) as error:
        return False, str(error)
    try:
        reports = [_solve(trial, step) for step in task.steps]
    except (ShellError, TaskError) as error:
        return False, str(error)
    finally:
        trial.close()
    return all(ok for ok, _ in reports), "; ".join(text for _, text in reports)


def _solve(trial: TaskTrial, step: TaskStep) -> tuple[bool, str]:
    name = f"step {step.name}: " if step.name else ""
    trial.begin_step(step)
    before = trial.verify(step, step.verifier_timeout_s)
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
