"""Redis keys of a run; the run id is the cluster hash tag."""

from collections.abc import Iterable
from dataclasses import dataclass

NAMESPACE = "offbeat"
RUNS = f"{NAMESPACE}:runs"
"""Sorted set: run ids by creation time."""

OFFERS = f"{NAMESPACE}:offers"
"""Hash: claimable generation application -> capabilities."""

ENDING = f"{NAMESPACE}:ending"
"""String with expiry: set while Serve shuts down."""


def claims_key(kind: str) -> str:
    """Hash: resource (`app`, `folder`) -> its run, or the runs that share it, separated by spaces."""
    return f"{NAMESPACE}:claims:{kind}"


def split_claim(claim: bytes | None) -> list[str]:
    """Return the runs of a claim."""
    return claim.decode().split() if claim else []


def join_claim(run_ids: Iterable[str]) -> str:
    return " ".join(run_ids)


def slots_key(kind: str) -> str:
    """Hash: resource -> number of runs that may claim it at once; absent: 1."""
    return f"{NAMESPACE}:slots:{kind}"


@dataclass(frozen=True, slots=True)
class RunKeys:
    run_id: str

    @property
    def prefix(self) -> str:
        return f"{NAMESPACE}:{{{self.run_id}}}:"

    def key(self, *parts: str) -> str:
        return self.prefix + ":".join(parts)

    @property
    def record(self) -> str:
        """Hash: run record."""
        return self.key("record")

    @property
    def lease(self) -> str:
        """String with expiry: holder of the lease."""
        return self.key("lease")

    @property
    def epoch(self) -> str:
        """Integer: fencing epoch, incremented by each lease, creation and deletion; kept for a while after deletion."""
        return self.key("epoch")

    @property
    def incarnation(self) -> str:
        """String: see `services.redis.incarnation`."""
        return self.key("incarnation")

    @property
    def progress(self) -> str:
        """Hash: newest `version`, and `step` of the last announced weights; absent before version 0."""
        return self.key("progress")

    @property
    def manifests(self) -> str:
        """Hash: retained version -> manifest."""
        return self.key("manifests")

    @property
    def versions(self) -> str:
        """Stream, trimmed: announced versions."""
        return self.key("versions")

    @property
    def served(self) -> str:
        """Hash: replica id -> report."""
        return self.key("served")

    @property
    def doorbell(self) -> str:
        """Stream, trimmed: weights, settings, ends and other events after which any waiting process looks again."""
        return self.key("doorbell")

    @property
    def metrics(self) -> str:
        """Stream: metric records."""
        return self.key("metrics")

    @property
    def trimmed_metrics(self) -> str:
        """List: `FIRST NEXT`, ids that bound a stretch of records that were trimmed, and maybe not copied."""
        return self.key("metrics", "trimmed")

    @property
    def writers(self) -> str:
        """Hash: writer -> number of its newest write by `RunWrites.once`."""
        return self.key("writers")

    @property
    def changes(self) -> str:
        """List: changes of settings, JSON."""
        return self.key("changes")

    @property
    def adopted(self) -> str:
        """Hash: index in `changes` (0-based) -> first optimizer batch (0-based)."""
        return self.key("adopted")

    @property
    def history(self) -> str:
        """Stream, trimmed: states, commands, deaths, changes."""
        return self.key("history")

    @property
    def turn(self) -> str:
        """Hash: the learner's turn on devices that engines share; absent outside of one."""
        return self.key("turn")

    @property
    def sharing_engines(self) -> str:
        """Hash: engine on the learner's devices -> last report, ms, and the turn in which it sleeps."""
        return self.key("turn", "engines")

    @property
    def turn_bell(self) -> str:
        """Stream, trimmed: begins and ends of turns, and engines that fell asleep."""
        return self.key("turn", "bell")

    @property
    def doing(self) -> str:
        """Hash: component -> activity or wait."""
        return self.key("doing")
