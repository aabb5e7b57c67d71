"""Remote services: a sample or a group as JSON, a score or a list of them back."""

import datetime
import json
import os
from typing import Any

import httpx
import msgspec

from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.function import read_number, read_numbers
from offbeat.services.reward.kinds.config import HttpConfig
from offbeat.services.reward.sample import GroupSample, RewardSample, encode_sample

MAX_REPLY_BYTES = 1 << 20
MAX_SHOWN_CHARS = 200
_RETRIED_STATUS = frozenset({408, 425, 429})
_SERVER_ERROR = 500


class ScoringClient:
    """Client of a service that scores what it is sent."""

    def __init__(self, config: HttpConfig) -> None:
        """Raises ValueError if the token's variable is not set."""
        self._url = config.url
        self._key = config.score_key
        self.source = f"{config.url}: {config.score_key}"
        self._client = JsonClient(config.timeout_s, config.max_concurrent, config.api_key_env)

    async def ask(self, sample: RewardSample | GroupSample) -> Any:
        """Return the reply's value of `score_key`; raises RewardError."""
        reply = await self._client.post(self._url, msgspec.msgpack.decode(encode_sample(sample)))
        if not isinstance(reply, dict) or self._key not in reply:
            raise RewardError(Failure.MALFORMED, f"{self._url}: the reply has no {self._key!r}: {shorten(reply)}")
        return reply[self._key]

    async def close(self) -> None:
        await self._client.close()


class HttpReward(ScoringClient):
    async def score(self, sample: RewardSample) -> float:
        return read_number(await self.ask(sample), self.source)


class HttpGroupReward(ScoringClient):
    async def score(self, sample: GroupSample) -> list[float]:
        return read_numbers(await self.ask(sample), len(sample.members), self.source)


class JsonClient:
    """POST of JSON with errors as `RewardError` and bounded replies."""

    def __init__(
        self,
        timeout_s: float,
        max_connections: int,
        api_key_env: str | None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """api_key_env: environment variable of a bearer token; raises ValueError without it."""
        headers = {}
        if api_key_env is not None:
            if not (token := os.environ.get(api_key_env)):
                raise ValueError(f"api_key_env: the environment variable {api_key_env} is not set")
            headers["Authorization"] = f"Bearer {token}"
        limits = httpx.Limits(max_connections=max_connections)
        self._client = httpx.AsyncClient(timeout=timeout_s, limits=limits, headers=headers, transport=transport)

    async def post(self, url: str, body: Any) -> Any:
        """Return the decoded reply; raises RewardError."""
        content = json.dumps(body, default=_to_json, ensure_ascii=True)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._client.stream("POST", url, content=content, headers=headers) as response:
                reply = await _read_bounded(response, url)
        except httpx.TimeoutException as error:
            raise RewardError(Failure.TIMEOUT, f"{url}: {error or type(error).__name__}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RewardError(Failure.UNAVAILABLE, f"{url}: {error or type(error).__name__}") from error
        status = response.status_code
        if status in _RETRIED_STATUS or status >= _SERVER_ERROR:
            raise RewardError(Failure.UNAVAILABLE, f"{url}: HTTP {status}: {shorten(reply)}")
        if not response.is_success:
            raise RewardError(Failure.ERROR, f"{url}: HTTP {status}: {shorten(reply)}")
        try:
            return json.loads(reply)
        except (ValueError, RecursionError):
            raise RewardError(Failure.MALFORMED, f"{url}: the reply is no JSON: {shorten(reply)}") from None

    async def close(self) -> None:
        await self._client.aclose()


async def _read_bounded(response: httpx.Response, url: str) -> bytes:
    reply = bytearray()
    async for chunk in response.aiter_bytes():
        reply += chunk
        if len(reply) > MAX_REPLY_BYTES:
            raise RewardError(Failure.MALFORMED, f"{url}: the reply exceeds {MAX_REPLY_BYTES:,} bytes")
    return bytes(reply)


def _to_json(value: Any) -> Any:
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        raise RewardError(Failure.BAD_ROW, "bytes in the row can't be sent as JSON")
    raise TypeError(f"a {type(value).__name__} can't be sent as JSON")


def shorten(reply: Any) -> str:
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else repr(reply)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
