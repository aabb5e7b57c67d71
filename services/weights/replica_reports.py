"""Reports of replicas to the broker."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    running: int = 0
    """Unanswered requests, including `waiting` ones."""
    waiting: int = 0
    """Requests that wait for newer weights or an update."""
    loading: int | None = None
    """Version being loaded; None while sampling."""
    loading_since: float = 0.0
    """Unix time, s."""


@dataclass(frozen=True, slots=True)
class FetchState:
    """A read of weights in progress."""

    version: int
    since: float
    """Unix time, s."""
    source: str
    """Location of the bytes, for messages."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica's version and load at a moment."""

    version: int
    at: float
    """Unix time, s."""
    load: ReplicaLoad = ReplicaLoad()
    host: str = ""
    """Host of the replica, for messages."""
    memory: str = ""
    """`Place.memory` of where it runs."""
    fetching: FetchState | None = None
    """Longest read in progress among newer versions."""


def encode_report(report: ReplicaReport) -> bytes:
    """Encode as JSON, to keep the Redis hash human-readable."""
    return json.dumps(asdict(report)).encode()


def decode_report(blob: bytes) -> ReplicaReport:
    """Decode the result of `encode_report`."""
    body = json.loads(blob)
    fetching = FetchState(**body["fetching"]) if body.get("fetching") else None
    return ReplicaReport(**{**body, "load": ReplicaLoad(**body["load"]), "fetching": fetching})
