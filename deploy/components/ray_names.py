"""Names of Ray's namespace, applications and actors, without importing Ray."""

NAMESPACE = "offbeat"
CONTROL_APP = "control"
REAPER = "reaper"
LEARNER_HOST_PREFIX = "learner-"


def follower_host_name(run_id: str, node: int) -> str:
    return f"followers-{node}-{run_id}"


def learner_host_name(run_id: str) -> str:
    return f"{LEARNER_HOST_PREFIX}{run_id}"
