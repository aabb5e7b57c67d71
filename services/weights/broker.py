"""Removal of unannounced or orphaned weight files, and the replicas' lag.

Invariant: neither bytes named by a manifest in Redis nor those that the learner is about to announce are removed while the
run is active. All state is in Redis and the transport.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ConnectionError, TimeoutError

from offbeat.services.errors import StoreUnavailableError, WeightsError
from offbeat.services.keys import RunKeys
from offbeat.services.messages.codec import decode_manifest
from offbeat.services.redis.errors import complaint
from offbeat.services.redis.run_writes import AsyncRunWrites
from offbeat.services.telemetry import AsyncRedisMetrics, MetricRecord, Partial
from offbeat.services.threads import DaemonThreads, HungError
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.replica_reports import ReplicaReport, decode_report
from offbeat.services.weights.transports.base import Transport, version_and_epoch
from offbeat.services.weights.transports.factory import leaves_files, make_transport

logger = logging.getLogger(__name__)

UNANNOUNCED_TTL_S = 300.0
"""Age at which a file without manifest is removed; an earlier learner may be hashing it, at about 1 GB/s."""
CHECK_INTERVAL_S = 30.0
"""Timeout of a scan; the next starts when a hung one has returned."""
MAX_REPORT_AGE_S = 30.0
"""Age at which a silent replica counts as gone."""


class WeightBroker:
    def __init__(
        self,
        redis: Redis,
        run_id: str,
        config: WeightsConfig,
        output_dir: Path,
        *,
        run_uid: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._redis: Any = redis
        self._keys = RunKeys(run_id)
        self._metrics = AsyncRedisMetrics(redis, run_id, run_uid)
        self._write = AsyncRunWrites(redis, run_id, run_uid)
        self._transport: Transport | None = None
        if leaves_files(config):
            self._transport = make_transport(config, run_id, output_dir)
        self._threads = DaemonThreads(1)
        self._clock = clock

    async def watch(self, every_s: float = 5.0) -> None:
        """Process announcements until cancelled, at most once a second and at least every `every_s`."""
        after = "$"
        while True:
            try:
                await self.collect()
                await self.measure()
                entries = await self._redis.xread({self._keys.versions: after}, block=int(every_s * 1000))
                if entries:
                    after = entries[0][1][-1][0]
            except (ConnectionError, TimeoutError) as error:
                logger.warning("%s", complaint(error))
            await asyncio.sleep(1.0)

    async def collect(self) -> int:
        """Remove files without a manifest and return their number; 0 while an earlier call hangs."""
        if self._transport is None or self._threads.num_hung:
            return 0
        try:
            return await self._collect(self._transport)
        except HungError:
            logger.warning(
                "the files of weight versions could not be seen to within %g s: the share may hang", CHECK_INTERVAL_S
            )
            return 0
        except (StoreUnavailableError, WeightsError) as error:
            logger.warning("files of weight versions are not collected: %s", error)
            return 0

    async def _collect(self, transport: Transport) -> int:
        stored = await self._threads.run(transport.stored, CHECK_INTERVAL_S)
        blobs = cast(list[bytes], await self._redis.hvals(self._keys.manifests))
        manifests = [decode_manifest(blob) for blob in blobs]
        named = {each.location for each in (*manifests, *(m.anchor for m in manifests if m.anchor))}
        epoch = int(await self._redis.get(self._keys.epoch) or 0)
        there = {file.location for file in stored}
        newest = max((manifest.version for manifest in manifests if manifest.location in there), default=-1)
        oldest = self._clock() - UNANNOUNCED_TTL_S
        orphans = [
            file.location
            for file in stored
            if file.location not in named
            and file.modified_at < oldest
            and not _may_be_announced(file.location, epoch, newest)
        ]
        for location in orphans:
            logger.info("collecting %s: no manifest names it", location)
            await self._threads.run(lambda location=location: transport.delete(location), CHECK_INTERVAL_S)
        return len(orphans)

    async def replicas(self) -> dict[str, ReplicaReport]:
        blobs = cast(dict[bytes, bytes], await self._redis.hgetall(self._keys.served))
        now, (redis_s, redis_us) = self._clock(), await self._redis.time()
        ahead_s = now - redis_s - redis_us / 1e6
        reports = {replica.decode(): decode_report(blob).shift_clock(ahead_s) for replica, blob in blobs.items()}
        silent = [replica for replica, report in reports.items() if report.at < now - MAX_REPORT_AGE_S]
        if silent:
            await self._write("HDEL", self._keys.served, *silent)
        return {replica: report for replica, report in reports.items() if replica not in silent}

    async def measure(self) -> dict[str, int]:
        newest = cast(bytes | None, await self._redis.hget(self._keys.progress, "version"))
        if newest is None:
            return {}
        serving = {replica: each.version for replica, each in (await self.replicas()).items() if each.version >= 0}
        lags = {replica: int(newest) - version for replica, version in serving.items()}
        for replica, lag in lags.items():
            values = {"lag": Partial("last", lag), "lag_max": Partial("max", lag)}
            await self._metrics.append(MetricRecord("weights", values, labels={"replica": replica}))
        return lags


def _may_be_announced(location: str, epoch: int, newest: int) -> bool:
    """Return whether the learner of `epoch` may still announce a file, as while Redis refuses writes."""
    version, of_epoch = version_and_epoch(location)
    return of_epoch >= epoch and version > newest
