# pyright: basic
"""Named Ray actors and Ray's errors."""

import time
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.util import list_named_actors

from offbeat.deploy.components.ray_names import NAMESPACE

KILL_TIMEOUT_S = 10.0


def find_actor(name: str) -> ActorHandle | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def list_actor_names() -> list[str]:
    """Return the names of the mesh's living actors, of all runs."""
    actors = cast(list[dict[str, str]], list_named_actors(all_namespaces=True))
    return [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]


def kill_actor(name: str) -> None:
    actor = find_actor(name)
    if actor is not None:
        ray.kill(actor, no_restart=True)


def kill_and_wait(name: str) -> None:
    """Kill an actor, and wait until its name is free; raises `TimeoutError`."""
    kill_actor(name)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while find_actor(name) is not None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} did not end in {KILL_TIMEOUT_S:g} s")
        time.sleep(0.05)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
