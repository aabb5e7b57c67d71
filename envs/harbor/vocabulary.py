"""Words of tasks, for the tiny policy's tokenizer."""

from collections.abc import Iterable, Iterator

from offbeat.envs.harbor.task import HarborTask, TaskStep

OUTPUT = "(no output) [exit code 1] 2] 126] 127] bash: line 1: command not found No such file or directory"


def task_words(tasks: Iterable[HarborTask]) -> Iterator[str]:
    yield from OUTPUT.split()
    for task in tasks:
        for step in task.steps:
            yield from step.instruction.split()
            for command in solution_commands(step):
                yield from command.split()


def solution_commands(step: TaskStep) -> list[str]:
    """Return the lines of a solution's script that are commands; empty without one."""
    path = step.solution / "solve.sh"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [line.strip() for line in lines if line.strip() and not line.startswith(("#", "set "))]
