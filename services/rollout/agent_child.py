"""The process of one foreign agent (`services.rollout.agents`): a function that is called, or a command that is run."""

import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.rollout.agent_task import AgentTask
from services.rollout.pipe_end import serve

TOLD = 2_000
"""Characters of a failed command's output that are told."""


def find_agent(path: str) -> Callable[[AgentTask], Any]:
    """The function of `module:function`.

    Raises:
        ValueError: there is none.
    """
    try:
        found: object = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"agent_runner.path {path!r}: {error}") from error
    if not callable(found):
        raise ValueError(f"agent_runner.path {path!r} is a {type(found).__name__}, not a function")
    return found


def call(path: str, plain: Mapping[str, Any]) -> Any:
    """Call the agent's function."""
    return find_agent(path)(AgentTask.of(plain))


def run(command: Sequence[str], plain: Mapping[str, Any]) -> Any:
    """Run the agent's command: the task is in its environment and on its stdin; the last line of its stdout, as JSON or as
    text, is what it returns.

    Raises:
        RuntimeError: it ended with another status than 0.
    """
    task = AgentTask.of(plain)
    done = subprocess.run(
        list(command),
        input=json.dumps(task.plain()),
        env={**os.environ, **task.environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr.strip()[-TOLD:]}")
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError:
        return lines[-1]


if __name__ == "__main__":
    serve({"call": call, "run": run})
