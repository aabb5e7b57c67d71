"""What other services import: open models of the Tinker servers in a Redis."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from redis.asyncio import Redis

from offbeat.services.tinker.config import TinkerConfig
from offbeat.services.tinker.exposition import FAMILIES, PREFIX, read_values
from offbeat.services.tinker.keys import SERVERS
from offbeat.services.tinker.store import TinkerStore

MODEL_FAMILIES = {name: (f"{PREFIX}_{name}", text) for name, text in FAMILIES.items()}
"""Name and help of a Prometheus family, by value."""


class OpenModel(NamedTuple):
    """server: its name in Redis, that of the application; values: by name in `MODEL_FAMILIES`."""

    server: str
    model_id: str
    values: Mapping[str, float]


async def read_open_models(redis: Redis) -> list[OpenModel]:
    """Return the models of all keys."""
    client: Any = redis
    models: list[OpenModel] = []
    for server in sorted(each.decode() for each in await client.smembers(SERVERS)):
        store = TinkerStore(redis, server, TinkerConfig())
        values = await read_values(store, await store.models_of_all())
        models += [OpenModel(server, model_id, own) for model_id, own in values.items()]
    return models
