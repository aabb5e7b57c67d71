"""Detection of another Redis server at the same address."""

from typing import Any, cast

from redis.asyncio import Redis


class ServerWatch:
    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._newest = ""
        """Process that answered last."""

    async def is_replaced(self) -> bool:
        """Return True once after each restart or failover."""
        info = cast(dict[str, Any], await self._redis.info("server"))
        before, self._newest = self._newest, str(info.get("run_id", ""))
        return before not in ("", self._newest)
