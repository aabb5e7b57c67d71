"""Where Redis, workers, broker and weights saturate: costs measured on this machine, a cluster simulated with published
figures of GPUs (docs/scale.md).

Assumptions: Llama 3.1 8B on one H100 per replica; turns of 128 tokens; env steps of 1 s; a learner that keeps up.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from offbeat.benchmarks.buffer.backends import server_cpu_s
from offbeat.benchmarks.buffer.load import RUN, GroupLoad, make_load
from offbeat.benchmarks.harness.environment import bench_environment
from offbeat.benchmarks.harness.result import machine, show
from offbeat.deploy.plan.distributions import ValueDistribution
from offbeat.deploy.plan.memory import BYTES_PER_TOKEN
from offbeat.deploy.plan.outcome import Setup, SimulatedRun
from offbeat.deploy.plan.simulation import Simulation
from offbeat.deploy.plan.workload import AssumedWorkload, Measures, TurnTimes
from offbeat.services.buffer.admin import configure_buffer
from offbeat.services.buffer.api import BufferLimits
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.buffer.worker_client import AsyncRolloutBuffer
from offbeat.services.keys import RunKeys
from offbeat.services.messages.types import EpisodeTask
from offbeat.services.redis.connection import connect_async
from offbeat.services.weights.broker import WeightBroker
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.replica_reports import ReplicaReport, encode_report

GROUP_SIZE, BATCH = 8, 8
TURN_TOKENS = 128
TOKEN_FIXED_S = 0.005
"""Of a token of one sequence alone: assumed, twice what 8 GB of weights take at 3.35 TB/s."""
TOKENS_PER_S = 15_220
"""Of an H100 with Llama 3.1 8B in FP8 at 1,000 + 1,000 tokens (TensorRT-LLM, docs/source/performance/perf-overview.md)."""
TRAINED_PER_GPU_S = 14_451
"""Tokens/s of an H100 with Llama 3 8B in FP8 (Megatron Bridge, docs/performance-summary.md, 25.11)."""
WEIGHTS_GB = 16.0
PLACES_PER_WORKER = 256
WORKER_TURN_S = 0.0001
"""CPU of an env worker per turn: .55 ms per trajectory of five turns (`offbeat bench scale`)."""
HEARTBEATS_PER_S = 2.0
WORKERS = (1, 16, 64, 256)
"""That play `IN_PLAY` groups of one episode."""
IN_PLAY, EPISODE_S = 4, 0.01


@dataclass(frozen=True, slots=True)
class Costs:
    """CPU in microseconds of Redis unless noted."""

    episode_us: float
    """Claim, submit, take and acknowledge."""
    empty_claim_us: float
    heartbeat_us: float
    """Of a worker with 256 episodes."""
    report_us: float
    """Of the broker's process and Redis, per replica and pass."""
    group_us: tuple[float, ...]
    """Of a group of one episode, by number of workers (`WORKERS`), nearly all of which wait."""


@dataclass(frozen=True, slots=True)
class ScaleRow:
    replicas: int
    episodes: int
    trajectories_per_s: float
    groups_per_s: float
    step_s: float
    lag: float
    redis_busy: float
    """Share of its core by episodes and heartbeats."""
    redis_waiting: float
    """Share by workers with free places that wait for groups to start."""
    worker_busy: float
    broker_pass_s: float
    weights_tb: float
    """Read from a shared store per version."""
    redis_mb_per_s: float
    learner_gpus: float


async def measure_costs(redis: Redis, url: str, folder: Path, tokens: int, groups: int) -> Costs:
    load = make_load(groups=groups, group_size=GROUP_SIZE, tokens=tokens, in_hand=PLACES_PER_WORKER, batch=BATCH)
    configure_buffer(redis, RUN, _limits(groups))
    redis.hset(RunKeys(RUN).progress, mapping={"version": 0, "step": 0})
    async with connect_async(url) as connection:
        worker = AsyncRolloutBuffer(connection, RUN)
        tasks: list[EpisodeTask] = []

        async def claim() -> None:
            while len(tasks) < PLACES_PER_WORKER:
                tasks.extend(await worker.claim("worker", PLACES_PER_WORKER - len(tasks)))

        async def beat() -> None:
            for _ in range(100):
                await worker.heartbeat("worker")

        async def claim_nothing() -> None:
            for _ in range(1000):
                assert not await worker.claim("worker", 0)

        played = await _cpu_us(redis, lambda: _play(redis, worker, load))
        configure_buffer(redis, RUN, _limits(groups + PLACES_PER_WORKER))
        await claim()
        return Costs(
            episode_us=played / (groups * GROUP_SIZE),
            empty_claim_us=await _cpu_us(redis, claim_nothing) / 1000,
            heartbeat_us=await _cpu_us(redis, beat) / 100,
            report_us=await _report_us(redis, connection, folder),
            group_us=tuple([await _group_us(redis, url, workers) for workers in WORKERS]),
        )


async def _play(redis: Redis, worker: AsyncRolloutBuffer, load: GroupLoad) -> None:
    learner = RedisLearnerBuffer(redis, RUN, int(cast(int, redis.incr(RunKeys(RUN).epoch))))
    for _ in range(load.num_groups // BATCH):
        tasks = await worker.claim("worker", BATCH * GROUP_SIZE)
        results = [worker.submit("worker", task, load.trajectories[task.number][task.index]) for task in tasks]
        await asyncio.gather(*results)
        taken = [group for i in range(BATCH) if (group := await asyncio.to_thread(learner.take, 5.0, BATCH - i))]
        await asyncio.to_thread(learner.ack, [group.entry_id for group in taken], 1)


async def _group_us(redis: Redis, url: str, workers: int, groups: int = 400) -> float:
    """Measure a group of one episode while a few are in play: most of the workers wait with free places."""
    redis.flushdb()
    load = make_load(groups=groups, group_size=1, tokens=256, in_hand=1, batch=1)
    configure_buffer(redis, RUN, BufferLimits(1, 0, 1, 1e6, IN_PLAY, groups, 3, 3600.0, "train"))
    redis.hset(RunKeys(RUN).progress, mapping={"version": 0, "step": 0})
    missing, finished = set(range(groups)), asyncio.Event()

    async def play(name: str) -> None:
        async with connect_async(url) as connection:
            buffer = AsyncRolloutBuffer(connection, RUN)
            while not finished.is_set():
                tasks = await buffer.claim(name, 2)
                for task in tasks:
                    await asyncio.sleep(EPISODE_S)
                    await buffer.submit(name, task, load.trajectories[task.number][0])
                    missing.discard(task.number)
                if not missing:
                    finished.set()
                elif not tasks:
                    await buffer.wait_for_work(name, 1.0)

    async def play_all() -> None:
        await asyncio.gather(*(play(f"worker-{number}") for number in range(workers)))

    return await _cpu_us(redis, play_all) / groups


async def _report_us(redis: Redis, connection: AsyncRedis, folder: Path, replicas: int = 1000) -> float:
    reports = {f"replica-{i}": encode_report(ReplicaReport(0, time.time() + 600)) for i in range(replicas)}
    redis.hset(RunKeys(RUN).served, mapping=cast(Any, reports))
    broker = WeightBroker(connection, RUN, WeightsConfig(), folder)
    own = time.process_time()
    spent = await _cpu_us(redis, broker.measure)
    return (spent + 1e6 * (time.process_time() - own)) / replicas


async def _cpu_us(redis: Redis, work: Callable[[], Awaitable[Any]]) -> float:
    before = server_cpu_s(redis)
    await work()
    return 1e6 * (server_cpu_s(redis) - before)


def _limits(groups: int) -> BufferLimits:
    return BufferLimits(GROUP_SIZE, 0, BATCH, 1e6, groups, groups, 3, 3600.0, "train")


def simulate(replicas: int, costs: Costs, options: argparse.Namespace) -> ScaleRow:
    episodes = replicas * options.episodes
    groups = episodes // GROUP_SIZE
    per_step = max(groups // options.batches, 1)
    limits = BufferLimits(GROUP_SIZE, 0, per_step, options.staleness, groups, 1 << 40, 3, 60.0, "drop")
    workers = -(-episodes // PLACES_PER_WORKER)
    setup = Setup(limits, "completion", episodes, workers, replicas)
    outcome = Simulation(setup, _measures(costs, options), 0).run(options.steps, options.steps // 3)
    return _row(setup, outcome, costs, options)


def _measures(costs: Costs, options: argparse.Namespace) -> Measures:
    turn = tuple((float(n), TURN_TOKENS * (TOKEN_FIXED_S + n / TOKENS_PER_S)) for n in (1, 1000))
    workload = AssumedWorkload(ValueDistribution.parse(options.turns), ValueDistribution.parse(options.env_latency))
    return Measures(
        workload, TurnTimes(turn), train_fixed_s=options.train, train_per_token_s=0.0, tokens=options.tokens,
        announce_s=0.1, serve_s=options.update, worker_s=WORKER_TURN_S, buffer_s=costs.episode_us / 1e6,
    )  # fmt: skip


def _row(setup: Setup, outcome: SimulatedRun, costs: Costs, options: argparse.Namespace) -> ScaleRow:
    rate = outcome.trajectories_per_s
    beats = HEARTBEATS_PER_S * setup.num_workers * costs.heartbeat_us / 1e6
    return ScaleRow(
        replicas=setup.num_replicas,
        episodes=setup.slots,
        trajectories_per_s=rate,
        groups_per_s=rate / GROUP_SIZE,
        step_s=outcome.step_s,
        lag=outcome.lag,
        redis_busy=outcome.buffer_busy + beats,
        redis_waiting=rate / GROUP_SIZE * (costs.group_us[-1] - costs.group_us[0]) / 1e6,
        worker_busy=outcome.worker_busy,
        broker_pass_s=setup.num_replicas * costs.report_us / 1e6,
        weights_tb=setup.num_replicas * WEIGHTS_GB / 1000,
        redis_mb_per_s=rate * options.tokens * BYTES_PER_TOKEN / 1e6,
        learner_gpus=rate * options.tokens / TRAINED_PER_GPU_S,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=(10, 100, 1000))
    parser.add_argument("--episodes", type=int, default=100, help="at a time, of a replica")
    parser.add_argument("--batches", type=int, default=4, help="that are in play")
    parser.add_argument("--turns", default="uniform:5:15")
    parser.add_argument("--env-latency", default="lognormal:1:2", help="of a step, s")
    parser.add_argument("--tokens", type=int, default=4096, help="of a trajectory")
    parser.add_argument("--train", type=float, default=5.0, help="of a batch, s")
    parser.add_argument("--update", type=float, default=2.0, help="from announced to served, s")
    parser.add_argument("--staleness", type=float, default=6.0)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--groups", type=int, default=256, help="that are measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with bench_environment() as base:
        measured = measure_costs(base.redis, base.redis_url, base.folder, options.tokens, options.groups)
        costs = asyncio.run(measured)
    shown = {name: value for name, value in asdict(costs).items() if name != "group_us"}
    show("CPU, us", tuple(shown), [list(shown.values())])
    show("group, CPU of Redis, us", ("workers", "us"), list(zip(WORKERS, costs.group_us, strict=True)))
    rows = [simulate(replicas, costs, options) for replicas in options.replicas]
    show("simulated", tuple(asdict(rows[0])), [list(asdict(row).values()) for row in rows])
    if options.json:
        result = {"machine": machine(), "costs": asdict(costs), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
