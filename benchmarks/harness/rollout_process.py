"""Env worker in a child process, with a replica or a scripted policy; runs share its engine."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import psutil

from offbeat.benchmarks.harness.child_process import Child
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.keys import RunKeys
from offbeat.services.rollout.config import WorkerSettings

LOAD_TIMEOUT_S = 20.0
LOG = "rollouts.log"
POLL_INTERVAL_S = 0.02
SAMPLE_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class PolicySpec:
    kind: Literal["vllm", "engine", "client", "service"]
    """`vllm`: real engine and replica. `engine`: scripted engine in a real replica. `client`: scripted policy, no
    replica. `service`: the run's generation service.
    """
    delay_s: float = 0.0
    ray_address: str = ""
    """Of `service`."""
    parts: Path | None = None
    """File for the times of a turn's parts (`benchmarks.turn`)."""
    config: GenerationConfig = field(default_factory=GenerationConfig)


@dataclass(frozen=True, slots=True)
class Usage:
    wall_s: float
    cpu_s: float
    """With descendants."""
    rss_bytes: int
    """At the end."""
    playing: float
    """Mean running episodes."""
    calls: int


class RolloutProcess(Child):
    def __init__(self, policy: PolicySpec, model: Path, *, sequence_length: int) -> None:
        super().__init__(_serve, (policy, model, sequence_length), log=model.parent / LOG, goodbye=("end",))

    def start_run(self, settings: WorkerSettings) -> None:
        self._ask(("play", settings))

    def stop(self) -> Usage:
        """Stop rollouts; release unfinished groups."""
        return self._ask(("stop",))

    def usage(self) -> Usage:
        return self._ask(("usage",))


async def _serve(pipe: Connection, policy: PolicySpec, model: Path, sequence_length: int) -> None:
    await _Host(pipe, policy, model, sequence_length).serve()


class _Host:
    def __init__(self, pipe: Connection, policy: PolicySpec, model: Path, sequence_length: int) -> None:
        self._pipe = pipe
        self._policy = policy
        self._model = model
        self._sequence_length = sequence_length

    async def serve(self) -> None:
        from offbeat.services.chat.append_only import load_chat_format

        self._chat = load_chat_format(self._model)
        engine = await self._engine()
        self._pipe.send("ready")
        try:
            while (message := await asyncio.to_thread(self._pipe.recv))[0] == "play":
                async with self._playing(message[1], engine) as meter:
                    self._pipe.send("playing")
                    while (await asyncio.to_thread(self._pipe.recv))[0] == "usage":
                        self._pipe.send(meter.usage())
                    last = meter.usage()
                self._pipe.send(last)
        finally:
            engine.close()

    async def _engine(self) -> Any:
        from offbeat.benchmarks.harness.scripted_policy import ScriptedEngine, ScriptedPolicy
        from offbeat.services.generation.vllm.engine import VllmEngine

        if self._policy.kind == "vllm":
            return await VllmEngine.start(
                self._policy.config, self._model, sequence_length=self._sequence_length, seed=0
            )
        if self._policy.kind == "service":
            self._connect_service()
        return ScriptedEngine(ScriptedPolicy(self._chat, seed=0), self._policy.delay_s)

    def _connect_service(self) -> None:
        import ray

        from offbeat.benchmarks.turn.worker_parts import measure_worker

        ray.init(address=self._policy.ray_address, log_to_driver=False)
        if self._policy.parts is not None:
            measure_worker(self._policy.parts)

    @asynccontextmanager
    async def _playing(self, settings: WorkerSettings, engine: Any) -> AsyncIterator["_Meter"]:
        from offbeat.services.buffer.worker_client import AsyncRolloutBuffer
        from offbeat.services.redis.connection import connect_async
        from offbeat.services.rollout.actor import tune_garbage_collector
        from offbeat.services.rollout.worker import EnvWorker
        from offbeat.services.telemetry import AsyncRedisMetrics

        async with connect_async(settings.redis_url) as redis:
            client, replica = self._client(settings, engine, redis)
            worker = EnvWorker(
                settings,
                "bench",
                buffer=AsyncRolloutBuffer(redis, settings.run_id),
                generation=client,
                metrics=AsyncRedisMetrics(redis, settings.run_id),
                chat=self._chat,
            )
            meter = _Meter(worker)
            tune_garbage_collector(settings.rollout.max_env_num_per_worker)
            working = self._start_task("env worker", worker.run())
            chores = [self._start_task("meter", meter.watch())]
            if replica is not None:
                chores.append(self._start_task("replica", replica.follow()))
            try:
                yield meter
            finally:
                worker.stop()
                await working
                await _wait_for_newest_version(replica, redis, settings.run_id)
                for chore in chores:
                    chore.cancel()
                await asyncio.gather(*chores, return_exceptions=True)

    def _start_task(self, name: str, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start a task; a failure is sent to the parent."""

        def report(task: "asyncio.Task[Any]") -> None:
            if not task.cancelled() and (error := task.exception()):
                self._pipe.send(RuntimeError(f"the {name} ended: {type(error).__name__}: {error}"))

        task = asyncio.create_task(work)
        task.add_done_callback(report)
        return task

    def _client(self, settings: WorkerSettings, engine: Any, redis: Any) -> Any:
        from offbeat.benchmarks.harness.scripted_policy import ReplicaGeneration, ScriptedGeneration, ScriptedPolicy
        from offbeat.services.generation.client import ServeGenerationClient
        from offbeat.services.generation.replica import GenerationReplica
        from offbeat.services.weights.config import WeightsConfig
        from offbeat.services.weights.subscriber import RedisWeightSubscriber

        if self._policy.kind == "client":
            return ScriptedGeneration(ScriptedPolicy(self._chat, seed=0), self._policy.delay_s), None
        if self._policy.kind == "service":
            return ServeGenerationClient(settings.generation_app, returns_routing=settings.returns_routing), None
        if self._policy.kind == "vllm":  # the next run has other weights of the same versions
            engine = engine.salted(secrets.token_hex(4))
        subscriber = RedisWeightSubscriber(redis, settings.run_id, WeightsConfig(), settings.output_dir)
        replica = GenerationReplica("bench", engine, subscriber, self._policy.config)
        return ReplicaGeneration(replica), replica


async def _wait_for_newest_version(replica: Any, redis: Any, run_id: str) -> None:
    newest = int(await redis.hget(RunKeys(run_id).progress, "version") or 0)
    try:
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            while replica is not None and replica.status()["version"] < newest:  # noqa: ASYNC110 -- it has no event
                await asyncio.sleep(POLL_INTERVAL_S)
    except TimeoutError:
        raise TimeoutError(f"the replica does not serve version {newest} after {LOAD_TIMEOUT_S:g} s") from None


class _Meter:
    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._process = psutil.Process()
        # Looked up once: to look for children is to look at every process of the machine.
        self._processes = (self._process, *self._process.children(recursive=True))
        self._began = time.monotonic()
        self._cpu_before = self._cpu_s()
        self._episode_s = 0.0

    async def watch(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            now = time.monotonic()
            self._episode_s += self._worker.num_playing * (now - before)
            before = now

    def usage(self) -> Usage:
        wall_s = time.monotonic() - self._began
        return Usage(
            wall_s=wall_s,
            cpu_s=self._cpu_s() - self._cpu_before,
            rss_bytes=self._process.memory_info().rss,
            playing=self._episode_s / wall_s,
            calls=self._worker.num_calls,
        )

    def _cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)
