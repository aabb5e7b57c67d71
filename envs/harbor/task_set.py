"""The tasks of a split."""

import logging
from fnmatch import fnmatch
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from offbeat.envs.harbor.config import HarborConfig
from offbeat.envs.harbor.obstacles import find_obstacles
from offbeat.envs.harbor.task import HarborTask, find_tasks

logger = logging.getLogger(__name__)

OWN_TASKS = Path(__file__).with_name("tasks")
HELD_OUT_SHARE = 5
"""Inverse share of tasks held out, by digest of their names."""
MAX_NAMED = 5
"""Tasks named in a message."""


def load_split(config: HarborConfig) -> tuple[HarborTask, ...]:
    """Load a split's tasks; raises ValueError without any, or with one that needs a container, unless skipped."""
    root, split = config.tasks_dir or OWN_TASKS, config.split
    if config.val_tasks_dir is not None:
        root, split = (config.val_tasks_dir if split == "held_out" else root), "any"
    return _load(root, split, config.tasks, config.unsupported, config.sandbox.image, config.sandbox.network != "none")


@lru_cache(maxsize=16)
def _load(
    root: Path,
    split: str,
    names: tuple[str, ...],
    unsupported: Literal["refuse", "skip"],
    image: str | None,
    has_network: bool,
) -> tuple[HarborTask, ...]:
    tasks = find_tasks(root)
    for pattern in names:
        if not any(fnmatch(task.name, pattern) for task in tasks):
            raise ValueError(f"tasks: {root} has no task {pattern!r}; it has {_list([task.name for task in tasks])}")
    tasks = tuple(task for task in tasks if not names or any(fnmatch(task.name, pattern) for pattern in names))
    found = {task.name: find_obstacles(task, image=image, has_network=has_network) for task in tasks}
    obstacles = {name: texts for name, texts in found.items() if texts}
    if obstacles and unsupported == "refuse":
        lines = [f"{name} ({'; '.join(found)})" for name, found in obstacles.items()]
        raise ValueError(
            f"{len(obstacles)} of {len(tasks)} tasks in {root} need a container: {_list(lines)}. Leave them out with "
            "`unsupported: skip` or by `tasks`"
        )
    if obstacles:
        logger.warning("%d of %d tasks in %s need a container and are left out", len(obstacles), len(tasks), root)
    here = [task for task in tasks if task.name not in obstacles]
    chosen = tuple(task for task in here if split == "any" or _is_held_out(task.name) == (split == "held_out"))
    if not chosen:
        hint = ": set val_tasks_dir, or `split: any`" if here else ""
        raise ValueError(f"no task of {root} is in split {split!r}{hint}")
    return chosen


def _is_held_out(name: str) -> bool:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") % HELD_OUT_SHARE == 0


def _list(texts: list[str]) -> str:
    more = f", and {len(texts) - MAX_NAMED} more" if len(texts) > MAX_NAMED else ""
    return ", ".join(texts[:MAX_NAMED]) + more
