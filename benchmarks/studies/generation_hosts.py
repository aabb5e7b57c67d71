"""Engine hosts in Ray Serve: our deployment around `AsyncLLM`, and Ray Serve LLM's `LLMServer`.

Tiny policy, 2 and 32 tokens, 64 in flight, 1 to 16 turns a call, through Serve and inside the replica. Reported: best
turns/s and least CPU time per turn.

    python -m offbeat.benchmarks.studies.generation_hosts [--rounds N]
"""

# pyright: basic
import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import psutil
import ray
from ray import serve

from offbeat.services.generation.config import EngineModelArgs, GenerationConfig
from offbeat.services.generation.replica import GenerationReplica
from offbeat.services.generation.vllm.arguments import engine_arguments, engine_environment
from offbeat.services.generation.vllm.engine import VllmEngine
from offbeat.services.messages.codec import (
    decode_completions,
    decode_requests,
    encode_completions,
    encode_requests,
)
from offbeat.services.messages.types import GenerateRequest, Manifest, Sampling
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import write_tiny_policy

CONFIG = GenerationConfig(model_args=EngineModelArgs(dtype="float32"), kv_cache_gib=0.25)
SEQUENCE_LENGTH = 512
IN_FLIGHT = 64
PROMPT_TOKENS = 100


class NoBroker:
    async def newest(self) -> Manifest | None:
        return None

    async def wait_newer(self, version: int, timeout_s: float) -> Manifest | None:
        raise NotImplementedError

    def fetch(self, manifest: Manifest) -> Any:
        raise NotImplementedError

    async def report(self, *_: Any) -> None:
        raise NotImplementedError

    async def retire(self, replica_id: str) -> None:
        raise NotImplementedError


def requests(count: int, tokens: int, offset: int) -> list[GenerateRequest]:
    sampling = Sampling(max_new_tokens=tokens)
    return [
        GenerateRequest(f"{offset + i}", tuple((offset + i + k) % 28 + 4 for k in range(PROMPT_TOKENS)), sampling)
        for i in range(count)
    ]


async def spread(call: Callable[[list[GenerateRequest]], Any], turns: int, tokens: int, per_call: int) -> float:
    """Return seconds for `turns` answers, `IN_FLIGHT` at a time."""
    free = asyncio.Semaphore(IN_FLIGHT // per_call)

    async def one(number: int) -> None:
        async with free:
            await call(requests(per_call, tokens, number * per_call))

    began = time.monotonic()
    await asyncio.gather(*(one(number) for number in range(turns // per_call)))
    return time.monotonic() - began


class HostedReplica:
    _replica: GenerationReplica

    async def _ready(self, llm: Any) -> None:
        engine = VllmEngine(llm, CONFIG)
        await engine.warm_up()
        await llm.update_weight_version("0")
        broker: Any = NoBroker()
        self._replica = GenerationReplica("bench", engine, broker, CONFIG)
        self._replica._version = 0

    async def generate(self, blob: bytes) -> AsyncIterator[bytes]:
        async for completions in self._replica.generate(decode_requests(blob)):
            yield encode_completions(completions)

    async def cpu_s(self) -> float:
        me = psutil.Process()
        return sum(sum(p.cpu_times()[:2]) for p in (me, *me.children(recursive=True)))

    async def inside(self, turns: int, tokens: int) -> float:
        async def call(batch: list[GenerateRequest]) -> None:
            async for _ in self._replica.generate(batch):
                pass

        return await spread(call, turns, tokens, 1)


class PlainHost(HostedReplica):
    async def __init__(self, model: Path) -> None:
        engine = await VllmEngine.start(CONFIG, model, sequence_length=SEQUENCE_LENGTH, seed=0)
        await self._ready(engine.llm)


def plain(model: Path) -> Any:
    return serve.deployment(name="host", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 1})(PlainHost).bind(
        model
    )


def llm_server(model: Path) -> Any:
    """Return Ray Serve LLM's server class, with its private vLLM client."""
    from ray.serve.llm import LLMConfig, LLMServer, build_llm_deployment

    class ServerHost(HostedReplica, LLMServer):
        async def __init__(self, llm_config: LLMConfig) -> None:
            os.environ.update(engine_environment(CONFIG))
            await LLMServer.__init__(self, llm_config)
            engine: Any = self.engine
            await self._ready(engine._engine_client)

    arguments = engine_arguments(CONFIG, model, SEQUENCE_LENGTH, 0)
    for ours in ("model", "skip_tokenizer_init"):
        del arguments[ours]
    config = LLMConfig(
        model_loading_config={"model_id": "tiny", "model_source": str(model)},
        engine_kwargs=arguments,
        placement_group_config={"bundles": [{"CPU": 1}]},
        deployment_config={"num_replicas": 1, "max_ongoing_requests": 4096},
        runtime_env={"env_vars": engine_environment(CONFIG)},
        log_engine_metrics=False,
    )
    return build_llm_deployment(config, deployment_cls=ServerHost, override_serve_options={"name": "host"})


async def measure(rounds: int) -> dict[str, float]:
    handle = serve.get_deployment_handle("host", "hosts")

    async def call(batch: list[GenerateRequest]) -> None:
        answers = cast(AsyncIterator[bytes], handle.options(stream=True).generate.remote(encode_requests(batch)))
        async for blob in answers:
            decode_completions(blob)

    best: dict[str, float] = {}

    async def timed(name: str, turns: int, load: Awaitable[float]) -> None:
        before = await handle.cpu_s.remote()
        rate = turns / await load
        cpu_ms = (await handle.cpu_s.remote() - before) / turns * 1000
        best[f"{name}: turns/s"] = round(max(best.get(f"{name}: turns/s", 0), rate))
        best[f"{name}: CPU ms/turn"] = round(min(best.get(f"{name}: CPU ms/turn", 1e9), cpu_ms), 3)

    for _ in range(rounds):
        for tokens, turns in ((2, 1600), (32, 320)):
            for per_call in (1, 8, 16):
                await timed(f"{tokens} tokens, {per_call} a call", turns, spread(call, turns, tokens, per_call))
            await timed(f"{tokens} tokens, in the replica", turns, handle.inside.remote(turns, tokens))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--hosts", nargs="+", default=["plain", "llm_server"])
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_policy(Path(folder), TinyPolicyConfig(), [f"w{i}" for i in range(25)])
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir="/tmp/offbeat-gh")
        try:
            for name in options.hosts:
                began = time.monotonic()
                serve.run(
                    {"plain": plain, "llm_server": llm_server}[name](Path(folder)), name="hosts", route_prefix=None
                )
                start_s = time.monotonic() - began
                results[name] = {"start, s": start_s, **asyncio.run(measure(options.rounds))}
                serve.delete("hosts")
        finally:
            serve.shutdown()
            ray.shutdown()
    json.dump(results, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
