"""Names of a run's keys in Redis; the run id is the cluster hash tag, so that one script may touch all of them."""

from dataclasses import dataclass

NAMESPACE = "offbeat"
RUNS = f"{NAMESPACE}:runs"
"""Sorted set: run ids by creation time."""

OFFERS = f"{NAMESPACE}:offers"
"""Hash: name of a generation application that any run may claim -> what it can do."""

ENDING = f"{NAMESPACE}:ending"
"""String with expiry: there while Serve is being shut down, and no learner is started."""


def claims_key(kind: str) -> str:
    """Hash: name of a resource that one run may use at a time (`app`, `folder`) -> the run that has claimed it."""
    return f"{NAMESPACE}:claims:{kind}"


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Every key of one run starts with `prefix`."""

    run_id: str

    @property
    def prefix(self) -> str:
        return f"{NAMESPACE}:{{{self.run_id}}}:"

    def key(self, *parts: str) -> str:
        return self.prefix + ":".join(parts)

    @property
    def record(self) -> str:
        """Hash: the run record of the control service."""
        return self.key("record")

    @property
    def lease(self) -> str:
        """String with expiry: holder of the learner's lease."""
        return self.key("lease")

    @property
    def epoch(self) -> str:
        """Integer: fencing epoch of the newest lease, or of the creation or deletion after it. Never goes down; outlives the
        run's other keys, with an expiry once the run is deleted."""
        return self.key("epoch")

    @property
    def progress(self) -> str:
        """Hash: `version` and `step` of the newest published weights; absent before the first."""
        return self.key("progress")

    @property
    def manifests(self) -> str:
        """Hash: version -> manifest of every kept version."""
        return self.key("manifests")

    @property
    def versions(self) -> str:
        """Stream, trimmed: the version numbers as they are announced; wakes the replicas."""
        return self.key("versions")

    @property
    def served(self) -> str:
        """Hash: replica id -> the version that it serves."""
        return self.key("served")

    @property
    def doorbell(self) -> str:
        """Stream, trimmed: rings whenever something may be claimable, servable or readable that was not before."""
        return self.key("doorbell")

    @property
    def metrics(self) -> str:
        """Stream of metric records."""
        return self.key("metrics")

    @property
    def changes(self) -> str:
        """List: changes of the run's settings in order, as JSON."""
        return self.key("changes")

    @property
    def adopted(self) -> str:
        """Hash: index in `changes` (0-based) -> the first optimizer batch (0-based) for which it holds."""
        return self.key("adopted")

    @property
    def history(self) -> str:
        """Stream, trimmed: what happened to the run itself: states, commands, deaths, changes."""
        return self.key("history")

    @property
    def doing(self) -> str:
        """Hash: part -> what it does or waits for at this moment."""
        return self.key("doing")
