# pyright: basic
"""Named Ray actors and Ray's errors."""

import ray
from ray.actor import ActorHandle

NAMESPACE = "offbeat"
CONTROL_APP = "control"
REAPER = "reaper"
LEARNER_HOST_PREFIX = "learner-"


def find_actor(name: str) -> ActorHandle | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def kill_actor(name: str) -> None:
    actor = find_actor(name)
    if actor is not None:
        ray.kill(actor, no_restart=True)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def learner_host_name(run_id: str) -> str:
    return f"{LEARNER_HOST_PREFIX}{run_id}"
