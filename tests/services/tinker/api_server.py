"""Service and app of Tinker's API over a real Redis, with a fake engine."""

from typing import Any

import httpx
from redis.asyncio import Redis

from offbeat.services.tinker.config import TinkerConfig
from offbeat.services.tinker.log import CommandLog
from offbeat.services.tinker.sampling import Sampler
from offbeat.services.tinker.service import BaseModelInfo, TinkerService
from offbeat.services.tinker.store import TinkerStore
from tests.services.tinker.test_sampling import FakeEngine

CONFIG = TinkerConfig(max_queued_commands=100, max_models_per_key=3, max_saved_gib=1.5)
KEY, OTHER_KEY = {"X-API-Key": "tml-one"}, {"X-API-Key": "tml-other"}


class Server:
    """App, the log that a learner would read, its Redis, and a client."""

    def __init__(self, client: httpx.AsyncClient, log: CommandLog, redis: Any, service: TinkerService) -> None:
        self.client, self.log, self.redis, self.service = client, log, redis, service

    async def post(self, path: str, body: Any, status: int = 200, key: dict[str, str] = KEY) -> Any:
        answer = await self.client.post(path, json=body, headers=key)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def create_model(self) -> tuple[str, str]:
        """Return a session's and its model's id."""
        session = (await self.post("/create_session", {}))["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 2}}
        return session, (await self.post("/create_model", body))["model_id"]


def make_service(redis: Redis, config: TinkerConfig) -> TinkerService:
    sampler = Sampler(FakeEngine(), [50], context=100, max_adapters=2)
    base = BaseModelInfo("base", "/models/base", "qwen2", 100)
    return TinkerService(TinkerStore(redis, "test", config), sampler, base, config)
