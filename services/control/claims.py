"""Exclusive resources of active runs: the folder, and the generation application."""

from collections.abc import Mapping, Sequence

from redis.asyncio.client import Pipeline

from offbeat.services.control.run import RunSpec
from offbeat.services.keys import claims_key


def exchange_claims(pipe: Pipeline, spec: RunSpec, released: Mapping[str, Sequence[str]]) -> None:
    for kind, names in released.items():
        pipe.hdel(claims_key(kind), *names)
    for kind, name in spec.claims.items():
        pipe.hset(claims_key(kind), name, spec.run_id)
