import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from redis import Redis

from offbeat.services.errors import CodecError
from offbeat.services.keys import RunKeys


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    running: int = 0
    """Unanswered requests, including `waiting`."""
    waiting: int = 0
    """Wait for newer weights or an update."""
    loading: int | None = None
    """Version being loaded; None while sampling."""
    loading_since: float = 0.0
    """Unix time, s."""
    refused: str = ""
    """Why the newest version is not served; empty if nothing was refused."""
    kv_usage: float = 0.0
    """Share of the KV cache that running requests hold."""
    kv_tokens: int = 0
    """Tokens that the KV cache holds; 0: unknown."""
    preemptions: int = 0
    """Requests since the engine's start that lost keys and values to others."""
    recent_preemptions: int = 0
    """The same, of the last 30 s."""


@dataclass(frozen=True, slots=True)
class FetchState:
    version: int
    since: float
    """Unix time, s."""
    source: str
    """Location of the bytes."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    version: int
    at: float
    """Unix time, s."""
    load: ReplicaLoad = ReplicaLoad()
    host: str = ""
    """For messages."""
    memory: str = ""
    """`Locality.memory` of its process."""
    fetching: FetchState | None = None
    """Longest read of newer versions."""
    received: float | None = None
    """`at` by Redis' clock, since nodes' clocks differ; older replicas have none."""

    def shift_clock(self, ahead_s: float) -> "ReplicaReport":
        """Return it with times of a clock that is ahead of Redis' one."""
        if self.received is None:
            return self
        shift_s = self.received + ahead_s - self.at
        load = replace(self.load, loading_since=self.load.loading_since + shift_s)
        fetching = self.fetching and replace(self.fetching, since=self.fetching.since + shift_s)
        return replace(self, at=self.at + shift_s, load=load, fetching=fetching)


def encode_report(report: ReplicaReport) -> bytes:
    """Encode as human-readable JSON."""
    return json.dumps(asdict(report)).encode()


def decode_report(blob: bytes) -> ReplicaReport:
    """Decode a report, ignoring unknown fields; raises `CodecError`."""
    try:
        body = json.loads(blob)
        fetching = FetchState(**_known(FetchState, body["fetching"])) if body.get("fetching") else None
        load = ReplicaLoad(**_known(ReplicaLoad, body["load"]))
        return ReplicaReport(**{**_known(ReplicaReport, body), "load": load, "fetching": fetching})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CodecError(f"malformed report of a replica: {error}") from error


def read_reports(redis: Redis, run_id: str) -> dict[str, ReplicaReport]:
    """Return each replica's newest report, with times of this process' clock; raises `CodecError`."""
    with redis.pipeline(transaction=False) as pipe:
        pipe.hgetall(RunKeys(run_id).served)
        pipe.time()
        blobs, (now_s, now_us) = pipe.execute()
    ahead_s = time.time() - now_s - now_us / 1e6
    return {replica.decode(): decode_report(blob).shift_clock(ahead_s) for replica, blob in blobs.items()}


def _known(kind: type[Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    return {each.name: tree[each.name] for each in fields(kind) if each.name in tree}
