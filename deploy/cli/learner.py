"""`offbeat learner attach`."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from offbeat.deploy import run_folder
from offbeat.deploy.redis_address import URL_FILE, find_url, resolve_url
from offbeat.services.errors import MeshError
from offbeat.trainer.cli import REDIS_VARIABLE, attach, end_process, follow

RUNS = Path("runs")


class UnknownRedisError(Exception):
    """Unknown Redis of a run."""


@dataclass(frozen=True, slots=True)
class Target:
    run_id: str
    redis_url: str


def find_target(run: str, redis_url: str | None) -> Target:
    """Find a run by name or folder. redis_url: URL or its file; not needed on the run's host.

    Raises `UnknownRedisError`, also for an unreadable configuration.
    """
    try:
        return _find_target(run, resolve_url(redis_url))
    except MeshError as error:
        raise UnknownRedisError(str(error)) from error


def _find_target(run: str, redis_url: str | None) -> Target:
    folder = next((folder for folder in (Path(run), RUNS / run) if (folder / run_folder.CONFIG).is_file()), None)
    run_id = run if folder is None else _name_of(folder)
    if redis_url is not None:
        return Target(run_id, redis_url)
    url = find_url(folder or RUNS / run)
    if url is None:
        raise UnknownRedisError(
            f"no run in {run} or {RUNS / run} is active on this host: pass its Redis as --redis, a URL or a file with it, "
            f"or in {REDIS_VARIABLE}; `offbeat train` writes the URL to endpoints.json in the run's folder, `serve deploy "
            f"deploy/deploy.yaml` to {RUNS / URL_FILE}"
        )
    return Target(run_id, url)


def attach_learner(run: str, redis_url: str | None, num_processes: int | None, node: int = 0) -> None:
    """Train a run, or host another node's ranks, exiting with the learner's code; raises `UnknownRedisError`."""
    target = find_target(run, redis_url)
    if node:
        end_process(follow(target.run_id, target.redis_url, node))

    command = ["offbeat", "learner", "attach", run]
    # A URL from the environment is not shown: it may contain a password
    command += [] if redis_url in (None, os.environ.get(REDIS_VARIABLE)) else ["--redis", redis_url]
    command += [] if num_processes is None else ["--nproc", str(num_processes)]
    end_process(
        attach(target.run_id, target.redis_url, num_processes=num_processes, resume_command=shlex.join(command))
    )


def _name_of(folder: Path) -> str:
    import yaml

    path = folder / run_folder.CONFIG
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UnknownRedisError(f"{path} can't be read: {' '.join(str(error).split())}") from error
    return str(tree["exp_name"]) if isinstance(tree, dict) and "exp_name" in tree else folder.name
