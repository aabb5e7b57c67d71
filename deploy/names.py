"""Names by which the parts of a run are found in a Ray cluster."""

NAMESPACE = "offbeat"
"""Ray namespace of our named actors."""
CONTROL_APP = "control"
WARDEN = "warden"
LEARNER_HOST = "learner-"


def learner_host(run_id: str) -> str:
    """The actor that hosts the managed learner."""
    return f"{LEARNER_HOST}{run_id}"
