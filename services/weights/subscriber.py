"""Replica side of the broker: waits for new versions and fetches them."""

import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

from redis import Redis as SyncRedis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, TimeoutError

from offbeat.services.errors import RewoundError
from offbeat.services.keys import RunKeys
from offbeat.services.messages.codec import decode_manifest
from offbeat.services.messages.types import Manifest
from offbeat.services.redis.connection import MAX_BLOCK_S
from offbeat.services.redis.errors import retryable
from offbeat.services.redis.run_writes import AsyncRunWrites
from offbeat.services.weights.api import IDLE
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.locality import this_locality
from offbeat.services.weights.reader import WeightReader
from offbeat.services.weights.replica_reports import FetchState, ReplicaLoad, ReplicaReport, encode_report
from offbeat.services.weights.transports.base import Transport
from offbeat.services.weights.transports.factory import make_transport


@contextmanager
def _retryable() -> Iterator[None]:
    try:
        yield
    except (ConnectionError, TimeoutError) as error:
        raise retryable(error) from error


class ReplicaReporter:
    def __init__(self, redis: Redis, run_id: str, run_uid: str) -> None:
        self._redis: Any = redis
        self._key = RunKeys(run_id).served
        self._write = AsyncRunWrites(redis, run_id, run_uid)

    async def report(
        self, replica_id: str, version: int, load: ReplicaLoad = IDLE, fetching: FetchState | None = None
    ) -> None:
        """Raise `RetryableError` while Redis does not answer. version: served; -1: none"""
        place = this_locality()
        with _retryable():
            now_s, now_us = await self._redis.time()
            received = now_s + now_us / 1e6
            report = ReplicaReport(version, time.time(), load, place.host, place.memory, fetching, received)
            await self._write("HSET", self._key, replica_id, encode_report(report))

    async def retire(self, replica_id: str) -> None:
        with _retryable():
            await self._write("HDEL", self._key, replica_id)


class RedisWeightSubscriber:
    def __init__(
        self,
        redis: Redis,
        run_id: str,
        config: WeightsConfig,
        output_dir: Path,
        *,
        pulls: SyncRedis | None = None,
        workers: int = 1,
        adapters: bool = False,
        run_uid: str = "",
    ) -> None:
        """pulls: connection that may block, for `ipc` and `nccl`. workers: GPUs of this replica."""
        self._redis: Any = redis
        self._keys = RunKeys(run_id)
        self._reporter = ReplicaReporter(redis, run_id, run_uid)
        self._transport: Transport = make_transport(
            config, run_id, output_dir, redis=pulls, workers=workers, adapter={} if adapters else None
        )
        self._reader = WeightReader(config.fetch_timeout_s)
        self._epoch: int | None = None
        """Of the last fetched version."""

    async def newest(self) -> Manifest | None:
        return await self._newest(-1)

    async def _newest(self, served: int) -> Manifest | None:
        """Return the newest readable version above `served`, skipping hung reads."""
        seen: dict[bytes, bytes] | None = None
        while True:
            with _retryable():
                blobs = cast(dict[bytes, bytes], await self._redis.hgetall(self._keys.manifests))
            for _, blob in sorted(blobs.items(), key=lambda item: int(item[0]), reverse=True):
                manifest = decode_manifest(blob)
                if manifest.version <= served:
                    await self._raise_if_rewound(manifest, served)
                    return None
                hangs = self._reader.hangs(manifest.version)
                if not hangs and await self._reader.call(self._transport.readable, manifest):
                    return manifest
            if blobs == seen:
                return None
            seen = blobs  # a learner that runs ahead may have replaced all of these meanwhile: look again

    async def _raise_if_rewound(self, newest: Manifest, served: int) -> None:
        if self._epoch is None or newest.epoch <= self._epoch or newest.version == served:
            return
        with _retryable():
            version = await self._redis.hget(self._keys.progress, "version")
        if version is not None and int(version) < served:
            raise RewoundError(f"version {served} did not survive: the run continues from version {newest.version}")

    async def wait_newer(self, version: int, timeout_s: float) -> Manifest | None:
        deadline = time.monotonic() + timeout_s
        with _retryable():
            last = await self._redis.xrevrange(self._keys.versions, count=1)
        after = last[0][0] if last else "0"
        while True:
            manifest = await self._newest(version)
            if manifest is not None:
                return manifest
            entries: list[Any] | None = None
            while not entries:
                left_ms = int((deadline - time.monotonic()) * 1000)
                if left_ms <= 0:
                    return None
                block_ms = min(left_ms, int(MAX_BLOCK_S * 1000))
                with _retryable():
                    entries = await self._redis.xread({self._keys.versions: after}, block=block_ms)
            after = entries[0][1][-1][0]

    def fetch(self, manifest: Manifest) -> AbstractAsyncContextManager[Path]:
        self._epoch = manifest.epoch
        num_bytes = manifest.num_bytes + (manifest.anchor.num_bytes if manifest.anchor else 0)
        return self._reader.open(manifest, self._transport.fetch(manifest), num_bytes)

    async def report(self, replica_id: str, version: int, load: ReplicaLoad = IDLE) -> None:
        await self._reporter.report(replica_id, version, load, self._reader.fetching(newer_than=version))

    async def retire(self, replica_id: str) -> None:
        await self._reporter.retire(replica_id)
