"""What a replica tells the broker about itself."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The version that a replica served at a moment."""

    version: int
    at: float
    """Unix time, s."""


def encode_report(report: ReplicaReport) -> bytes:
    """As JSON, so that people can read the hash."""
    return json.dumps(asdict(report)).encode()


def decode_report(blob: bytes) -> ReplicaReport:
    """Undo `encode_report`."""
    body = json.loads(blob)
    return ReplicaReport(int(body["version"]), float(body["at"]))
