"""Checks of agents and other functions."""

import importlib
import inspect
import shutil
import subprocess
from collections.abc import Iterator

from offbeat.envs.class_path import current_path
from offbeat.services.rollout.agents.environment import agent_environment
from offbeat.services.rollout.agents.runner import is_coroutine
from offbeat.services.rollout.config import AgentRunner, CustomEnv
from offbeat.trainer.config.issue import ConfigIssue

PYTHON_TIMEOUT_S = 30.0
FIND_MODULE = """
import importlib.util, sys
if sys.version_info < (3, 10):
    print(f"is Python {sys.version_info[0]}.{sys.version_info[1]}: take 3.10 or newer")
elif importlib.util.find_spec(sys.argv[1]) is None:
    print(f"has no module {sys.argv[1]!r}; it searches {[path for path in sys.path if path]}")
"""
"""Prints why an interpreter can't run a module, importing only its parents."""


def check_agent(tag: str, runner: AgentRunner) -> Iterator[ConfigIssue]:
    key = f"custom_envs.{tag}.agent_runner"
    program = runner.python or (runner.command[0] if runner.command else "")
    if program and shutil.which(program) is None:
        name = "python" if runner.python else "command"
        yield ConfigIssue(f"{key}.{name}", f"there is no program {program!r} on the PATH")
    elif runner.python:
        if problem := import_problem(runner.python, current_path(runner.path).partition(":")[0]):
            yield ConfigIssue(f"{key}.python", f"{runner.python} {problem}")
    elif runner.path:
        issues = list(check_function(f"{key}.path", runner.path))
        yield from issues
        if not issues and runner.episodes_per_process > 1 and not _is_coroutine(runner.path):
            message = f"{runner.path} is no coroutine function: write `async def`, or leave it out"
            yield ConfigIssue(f"{key}.episodes_per_process", message)


def check_time(tag: str, env: CustomEnv) -> Iterator[ConfigIssue]:
    runner = env.agent_runner
    if runner and "timeout_s" in runner.model_fields_set and runner.timeout_s > env.episode_timeout_s:
        yield ConfigIssue(
            f"custom_envs.{tag}.agent_runner.timeout_s",
            f"the episode ends after episode_timeout_s, {env.episode_timeout_s:g} s: take at most that, or "
            f"episode_timeout_s: {runner.timeout_s:g}",
        )


def import_problem(python: str, module: str) -> str:
    """Return why an interpreter can't import a module, or ""."""
    try:
        process = subprocess.run(
            [python, "-c", FIND_MODULE, module],
            env=agent_environment(python),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PYTHON_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"can't be run: {error}"
    if process.returncode:
        lines = process.stderr.strip().splitlines()
        return f"can't find module {module!r}: {lines[-1] if lines else f'exit status {process.returncode}'}"
    return process.stdout.strip()


def _is_coroutine(path: str) -> bool:
    module, _, function = current_path(path).partition(":")
    return is_coroutine(getattr(importlib.import_module(module), function))


def check_function(key: str, path: str) -> Iterator[ConfigIssue]:
    module, _, function = current_path(path).partition(":")
    if not module or not function:
        yield ConfigIssue(key, f"expected `module:function`, got {path!r}")
        return
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        yield ConfigIssue(key, f"can't import {module!r}: {type(error).__name__}: {error}")
        return
    if not callable(getattr(imported, function, None)):
        known = [name for name, value in inspect.getmembers(imported, inspect.isfunction) if value.__module__ == module]
        yield ConfigIssue(key, f"{module} has no function {function!r}; it has {', '.join(known) or 'none'}")
