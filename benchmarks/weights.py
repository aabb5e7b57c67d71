"""`offbeat bench weights`: time from `publish` until the last replica serves the version.

Invariant: references (copies, an engine step under load) use the same bytes, in the same call.
"""

import asyncio
import itertools
import math
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis
from rich.status import Status

from offbeat.benchmarks.harness.environment import (
    TAG,
    BenchEnvironment,
    bench_environment,
    slow_lake,
)
from offbeat.benchmarks.harness.process_actor import ProcessActor
from offbeat.benchmarks.harness.result import Spread, console, show
from offbeat.benchmarks.weight_deltas import DeltaOptions, measure, show_deltas
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.local.processes import SHARED_MEMORY
from offbeat.services.generation.config import Dtype, EngineModelArgs, GenerationConfig
from offbeat.services.keys import RunKeys
from offbeat.services.messages.types import GenerateRequest, Sampling
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.replica_reports import decode_report
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig

SHAPES = {
    "1M": TinyPolicyConfig(hidden_size=128, intermediate_size=512, num_hidden_layers=4),
    "16M": TinyPolicyConfig(hidden_size=384, intermediate_size=1536, num_hidden_layers=7, num_attention_heads=6),
    "135M": TinyPolicyConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=14, num_attention_heads=12),
}
SEQUENCE_LENGTH = 512
PROMPT_TOKENS = 32
ANSWER_TOKENS = 64
SERVED_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class WeightOptions:
    sizes: tuple[str, ...] = tuple(SHAPES)
    replicas: tuple[int, ...] = (1, 2)
    rounds: int = 5
    running: int = 8
    """Concurrent requests per replica."""
    dtype: Dtype = "bfloat16"
    pause_between_s: float = 0.5
    deltas: DeltaOptions = field(default_factory=DeltaOptions)


@dataclass(frozen=True, slots=True)
class ReplicaSeen:
    step_s: float
    """Median engine step without updates."""
    pauses_s: tuple[float, ...]
    loads_s: tuple[float, ...]
    """Load and comparison: before the pause if staged, else in it."""


class LoadedReplica:
    """Replica under load that follows the broker."""

    def __init__(
        self, name: str, run_id: str, redis_url: str, folder: Path, model: Path, options: WeightOptions
    ) -> None:
        self._name = name
        self._run_id = run_id
        self._redis_url = redis_url
        self._folder = folder
        self._model = model
        self._options = options

    async def start(self) -> None:
        from offbeat.services.generation.replica import GenerationReplica
        from offbeat.services.generation.vllm.engine import VllmEngine

        config = GenerationConfig(model_args=EngineModelArgs(dtype=self._options.dtype), kv_cache_gib=0.25)
        self._engine = await VllmEngine.start(config, self._model, sequence_length=SEQUENCE_LENGTH, seed=0)
        self._loads: list[Any] = []
        self._steps: list[float] = []
        replica = GenerationReplica(self._name, _Timed(self._engine, self._loads), self._subscriber(), config)
        await replica.catch_up()
        self._tasks = [asyncio.create_task(replica.follow())]
        self._tasks += [asyncio.create_task(self._keep_running(replica, i)) for i in range(self._options.running)]

    def _subscriber(self) -> Any:
        from offbeat.services.weights.subscriber import RedisWeightSubscriber

        return RedisWeightSubscriber(Redis.from_url(self._redis_url), self._run_id, WeightsConfig(), self._folder)

    async def take_measurements(self) -> ReplicaSeen:
        for task in self._tasks:
            if task.done():
                task.result()
        loads, steps = list(self._loads), sorted(self._steps)
        self._loads.clear()
        self._steps.clear()
        step_s = steps[len(steps) // 2] if steps else float("nan")
        return ReplicaSeen(step_s, tuple(x.pause_s for x in loads), tuple(x.load_s for x in loads))

    async def _keep_running(self, replica: Any, place: int) -> None:
        """Send requests; those of one version measure the engine's step."""
        draw = random.Random(place)
        for number in itertools.count():
            prompt = tuple(draw.randrange(16) for _ in range(PROMPT_TOKENS))
            request = GenerateRequest(f"{place}-{number}", prompt, Sampling(max_new_tokens=ANSWER_TOKENS))
            began = time.monotonic()
            async for (completion,) in replica.generate([request]):
                if len(completion.versions) == 1:
                    self._steps.append((time.monotonic() - began) / len(completion.token_ids))

    def close(self) -> None:
        self._engine.close()


class _Timed:
    def __init__(self, engine: Any, loads: list[Any]) -> None:
        self._engine = engine
        self._loads = loads
        self.generate, self.stage = engine.generate, engine.stage
        self.abort, self.sleep, self.wake = engine.abort, engine.sleep, engine.wake
        self.check, self.close = engine.check, engine.close
        self.session_counts, self.kv_load = engine.session_counts, engine.kv_load

    async def load(self, path: Path, version: int) -> Any:
        times = await self._engine.load(path, version)
        self._loads.append(times)
        return times


def run(options: WeightOptions) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    with console().status("starting") as status, bench_environment() as base:
        for size in options.sizes:
            rows += [_ReplicaRun(base, options, size, replicas, status).measure() for replicas in options.replicas]
        deltas = measure(base, options.deltas, status.update)
    _show(rows)
    show_deltas(deltas)
    return {"settings": rows, "deltas": deltas}


class _ReplicaRun:
    def __init__(
        self, base: BenchEnvironment, options: WeightOptions, size: str, replicas: int, status: Status
    ) -> None:
        self._base = base
        self._options = options
        self._size = size
        self._replicas = replicas
        self._status = status
        self._label = f"{size}, {replicas} replica{'s' if replicas > 1 else ''}"

    def measure(self) -> dict[str, Any]:
        from offbeat.services.weights.publisher import RedisWeightPublisher

        config = self._config()
        weights = self._weights(config)
        num_bytes = sum(t.numel() * t.element_size() for _, t in weights)
        self._status.update(f"{self._label}: starting engines")
        with ExitStack() as stack:
            publisher = stack.enter_context(
                closing(RedisWeightPublisher(self._base.redis, config.exp_name, config.weights, 1, config.output_dir))
            )
            hosts = [stack.enter_context(self._host(config, i)) for i in range(self._replicas)]
            publisher.publish(0, 0, weights)
            publisher.flush()
            self._wait_served(config, 0)
            step_s = self._step_s(hosts)
            times = [self._round(config, publisher, weights, version + 1) for version in range(self._options.rounds)]
            seen = self._seen(hosts)
        copies = _copies(weights, self._options.rounds, self._base.folder.name)
        return self._row(num_bytes, times, max(step_s), seen, copies)

    def _step_s(self, hosts: Sequence[ProcessActor]) -> list[float]:
        self._seen(hosts)
        deadline = time.monotonic() + SERVED_TIMEOUT_S
        while True:
            time.sleep(2 * self._options.pause_between_s)
            step_s = [seen.step_s for seen in self._seen(hosts)]
            if not any(map(math.isnan, step_s)):
                return step_s
            if time.monotonic() > deadline:
                raise TimeoutError(f"no request was answered within {SERVED_TIMEOUT_S:.0f} s")

    def _config(self) -> RunConfig:
        name = f"bench-{self._size}-{self._replicas}"
        config = self._base.run_config(name, custom_envs={TAG: slow_lake({})}, tiny=SHAPES[self._size])
        self._base.prepare(config)
        return config

    def _host(self, config: RunConfig, number: int) -> ProcessActor:
        name, folder = f"replica-{number}", config.output_dir
        replica = LoadedReplica(name, config.exp_name, self._base.redis_url, folder, folder / "policy", self._options)
        return ProcessActor(replica, folder / f"{name}.log")

    def _weights(self, config: RunConfig) -> list[tuple[str, Any]]:
        import torch

        from offbeat.trainer.config.actor_train import ModelArgs
        from offbeat.trainer.models.loading import load_policy

        policy = load_policy(config.output_dir / "policy", ModelArgs(), seed=0, temperature=1.0).model
        dtype = getattr(torch, self._options.dtype)
        return [(n, t.to(dtype)) for n, t in policy.state_dict().items() if n != "lm_head.weight"]

    def _round(
        self, config: RunConfig, publisher: Any, weights: list[tuple[str, Any]], version: int
    ) -> dict[str, float]:
        self._status.update(f"{self._label}: version {version}/{self._options.rounds}")
        for _, tensor in weights:
            tensor.mul_(1.0001)
        began, wall = time.monotonic(), time.time()
        publisher.publish(version, version, weights)
        blocked_s = time.monotonic() - began
        publisher.flush()
        served_at = self._wait_served(config, version)
        announced_at = self._announced_at(config)
        time.sleep(self._options.pause_between_s)
        return {"blocked_s": blocked_s, "announced_s": announced_at - wall, "served_s": served_at - wall}

    def _wait_served(self, config: RunConfig, version: int) -> float:
        """Return the last replica's Unix time."""
        key = RunKeys(config.exp_name).served
        deadline = time.monotonic() + SERVED_TIMEOUT_S
        while time.monotonic() < deadline:
            blobs = cast(dict[bytes, bytes], self._base.redis.hgetall(key)).values()
            reports = [decode_report(blob) for blob in blobs]
            if len(reports) == self._replicas and all(report.version >= version for report in reports):
                return max(report.at for report in reports)
            time.sleep(0.002)
        raise TimeoutError(f"version {version} was not served by all replicas within {SERVED_TIMEOUT_S:.0f} s")

    def _announced_at(self, config: RunConfig) -> float:
        newest = cast(Any, self._base.redis.xrevrange(RunKeys(config.exp_name).versions, count=1))
        return int(newest[0][0].partition(b"-")[0]) / 1000

    def _seen(self, hosts: Sequence[ProcessActor]) -> list[ReplicaSeen]:
        return [host.call("take_measurements") for host in hosts]

    def _row(
        self,
        num_bytes: int,
        times: Sequence[dict[str, float]],
        step_s: float,
        seen: Sequence[ReplicaSeen],
        copies: dict[str, Spread],
    ) -> dict[str, Any]:
        pause = Spread.of(p for each in seen for p in each.pauses_s)
        served = Spread.of(t["served_s"] for t in times)
        return {
            "size": self._size,
            "replicas": self._replicas,
            "num_bytes": num_bytes,
            "blocked_s": Spread.of(t["blocked_s"] for t in times),
            "announced_s": Spread.of(t["announced_s"] for t in times),
            "served_s": served,
            "pause_s": pause,
            "load_s": Spread.of(p for each in seen for p in each.loads_s),
            "engine_step_s": step_s,
            "pause_in_steps": pause.median / step_s,
            "bytes_per_s": num_bytes / served.median,
            "memcpy_bytes_per_s": num_bytes / copies["memcpy_s"].median,
            "file_copy_bytes_per_s": num_bytes / copies["file_copy_s"].median,
        }


def _copies(weights: Sequence[tuple[str, Any]], rounds: int, name: str) -> dict[str, Spread]:
    """Return seconds of copies in memory and in shared memory."""
    import torch

    source = torch.cat([tensor.flatten() for _, tensor in weights])
    target = torch.empty_like(source)
    memory: list[float] = []
    files: list[float] = []
    one, other = (SHARED_MEMORY / f"{name}-{which}" for which in ("a", "b"))
    try:
        one.write_bytes(source.view(torch.uint8).numpy().tobytes())
        for _ in range(rounds + 1):
            began = time.monotonic()
            target.copy_(source)
            memory.append(time.monotonic() - began)
            began = time.monotonic()
            shutil.copyfile(one, other)
            files.append(time.monotonic() - began)
    finally:
        one.unlink(missing_ok=True)
        other.unlink(missing_ok=True)
    return {"memcpy_s": Spread.of(memory[1:]), "file_copy_s": Spread.of(files[1:])}


def _show(rows: Sequence[dict[str, Any]]) -> None:
    columns = ("parameters", "replicas", "MB", "learner blocked ms", "announced ms", "loading ms", "served ms")
    columns += ("pause ms", "engine step ms", "pause in steps", "MB/s", "memcpy MB/s", "file copy MB/s")
    show(
        "From publish to served, generations running",
        columns,
        [
            [
                r["size"],
                r["replicas"],
                r["num_bytes"] / 1e6,
                *(1000 * r[name].median for name in ("blocked_s", "announced_s", "load_s", "served_s", "pause_s")),
                1000 * r["engine_step_s"],
                r["pause_in_steps"],
                *(r[name] / 1e6 for name in ("bytes_per_s", "memcpy_bytes_per_s", "file_copy_bytes_per_s")),
            ]
            for r in rows
        ],
    )
