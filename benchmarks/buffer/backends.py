"""Trajectory buffer and plain redis-py on one server."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, cast

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.benchmarks.buffer.load import (
    RUN,
    GroupLoad,
    Rates,
    Side,
    expect,
)
from offbeat.benchmarks.harness import event_loop
from offbeat.services.buffer.admin import configure_buffer
from offbeat.services.buffer.api import BufferLimits
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.buffer.worker_client import AsyncRolloutBuffer
from offbeat.services.keys import RunKeys
from offbeat.services.messages.codec import decode_trajectory, encode_trajectory
from offbeat.services.redis.connection import connect_async

WORKER = "worker"
STREAM = "bench-raw"
READER = "reader"
NUM_SUBMITTERS = 2
"""One half claims while the other submits."""


def server_cpu_s(redis: Redis) -> float:
    used = cast(dict[str, float], redis.info("cpu"))
    return used["used_cpu_user"] + used["used_cpu_sys"]


def measure_cpu(side: Side, redis: Redis) -> Side:
    def measured(load: GroupLoad) -> Rates:
        client, server = time.process_time(), server_cpu_s(redis)
        rates = side(load)
        spent = time.process_time() - client + server_cpu_s(redis) - server
        return replace(rates, cpu_us=1e6 * spent / (load.num_groups * load.group_size))

    return measured


def offbeat_side(redis: Redis, url: str) -> Side:

    def side(load: GroupLoad) -> Rates:
        redis.flushdb()
        configure_buffer(redis, RUN, _limits(load))
        keys = RunKeys(RUN)
        redis.hset(keys.progress, mapping={"version": 0, "step": 0})  # weights, as far as admission is concerned
        buffer = RedisLearnerBuffer(redis, RUN, int(cast(int, redis.incr(keys.epoch))))
        into = event_loop.run(_claim_and_submit(load, url))
        start = time.perf_counter()
        for _ in range(load.num_groups // load.batch):
            groups = [group for i in range(load.batch) if (group := buffer.take(5.0, load.batch - i)) is not None]
            expect(sum(len(group.trajectories) for group in groups), load.batch * load.group_size, "trajectories")
            buffer.ack([group.entry_id for group in groups], 1)
        out = time.perf_counter() - start
        expect(buffer.counters().trained, load.num_groups, "groups")
        return Rates(load.num_groups / into, load.num_groups / out)

    return side


def raw_side(redis: Redis, url: str, *, pipelined: bool, codec: bool = False) -> Side:
    """Measure a stream of trajectories. pipelined: one pipeline per group, one read per batch. codec: encode, decode,
    check.
    """

    def side(load: GroupLoad) -> Rates:
        redis.flushdb()
        redis.xgroup_create(STREAM, READER, id="0", mkstream=True)
        into = event_loop.run(_append(load, url, pipelined=pipelined, codec=codec))
        batch_size = load.batch * load.group_size
        start = time.perf_counter()
        for _ in range(load.num_groups // load.batch):
            ids: list[bytes] = []
            while len(ids) < batch_size:
                count = batch_size if pipelined else load.group_size
                streams = cast(list[Any], redis.xreadgroup(READER, READER, {STREAM: ">"}, count=count))
                ids += [entry for entry, _ in streams[0][1]]
                for _, fields in streams[0][1] if codec else ():
                    decode_trajectory(fields[b"b"])
            with redis.pipeline(transaction=False) as pipe:
                pipe.xack(STREAM, READER, *ids)
                pipe.xdel(STREAM, *ids)
                pipe.execute()
        out = time.perf_counter() - start
        expect(cast(int, redis.xlen(STREAM)), 0, "trajectories left")
        return Rates(load.num_groups / into, load.num_groups / out)

    return side


def _limits(load: GroupLoad) -> BufferLimits:
    return BufferLimits(
        group_size=load.group_size,
        redundancy=0,
        groups_per_step=load.batch,
        max_staleness=1e9,
        max_groups_in_flight=load.num_groups,
        total_groups=load.num_groups,
        max_attempts=1,
        worker_timeout_s=600.0,
        stale_policy="train",
    )


async def _claim_and_submit(load: GroupLoad, url: str) -> float:
    redis = connect_async(url)
    buffer = AsyncRolloutBuffer(redis, RUN)

    async def play() -> None:
        while tasks := await buffer.claim(WORKER, load.in_hand // NUM_SUBMITTERS):
            await asyncio.gather(
                *(buffer.submit(WORKER, task, load.trajectories[task.number][task.index]) for task in tasks)
            )

    return await _measure_s(redis, NUM_SUBMITTERS, play)


async def _append(load: GroupLoad, url: str, *, pipelined: bool, codec: bool) -> float:
    redis = connect_async(url)
    rows = _payloads(load, load.group_size if pipelined else 1)

    async def play() -> None:
        for parcel in rows:
            if codec:
                for fields in parcel:
                    fields["b"] = encode_trajectory(load.trajectories[fields["n"]][fields["i"]])
            if len(parcel) == 1:
                await redis.xadd(STREAM, parcel[0])
                continue
            async with redis.pipeline(transaction=False) as pipe:
                for fields in parcel:
                    pipe.xadd(STREAM, fields)
                await pipe.execute()

    return await _measure_s(redis, max(1, load.in_hand // (load.group_size if pipelined else 1)), play)


def _payloads(load: GroupLoad, size: int) -> Iterator[list[dict[Any, Any]]]:
    for number, blobs in enumerate(load.blobs):
        fields = [{"n": number, "i": index, "b": blob} for index, blob in enumerate(blobs)]
        for first in range(0, len(fields), size):
            yield fields[first : first + size]


async def _measure_s(redis: AsyncRedis, players: int, play: Callable[[], Awaitable[None]]) -> float:
    try:
        start = time.perf_counter()
        await asyncio.gather(*(play() for _ in range(players)))
        return time.perf_counter() - start
    finally:
        await redis.aclose()
