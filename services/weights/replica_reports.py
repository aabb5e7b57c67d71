"""What a replica tells the broker about itself."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a replica has in hand."""

    running: int = 0
    """Requests that came and are not answered, `waiting` ones among them."""
    waiting: int = 0
    """Requests that wait for newer weights, or for an update to end."""
    loading: int | None = None
    """The version that it is loading; None while it samples."""
    loading_since: float = 0.0
    """Unix time, s."""


@dataclass(frozen=True, slots=True)
class FetchState:
    """A read of weights that has not come back."""

    version: int
    since: float
    """Unix time, s."""
    source: str
    """Where the bytes lie, for people."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The version that a replica served at a moment."""

    version: int
    at: float
    """Unix time, s."""
    load: ReplicaLoad = ReplicaLoad()
    host: str = ""
    """Where it runs, for people."""
    memory: str = ""
    """`Place.memory` of where it runs."""
    fetching: FetchState | None = None
    """What it has been reading the longest, of versions newer than the one that it serves."""


def encode_report(report: ReplicaReport) -> bytes:
    """As JSON, so that people can read the hash."""
    return json.dumps(asdict(report)).encode()


def decode_report(blob: bytes) -> ReplicaReport:
    """Undo `encode_report`."""
    body = json.loads(blob)
    fetching = FetchState(**body["fetching"]) if body.get("fetching") else None
    return ReplicaReport(**{**body, "load": ReplicaLoad(**body["load"]), "fetching": fetching})
