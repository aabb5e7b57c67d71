"""`offbeat bench generation`: the generation service against a bare vLLM engine, in turn.

Invariant: equal prompts, new to the prefix cache; exactly `tokens` sampled tokens each.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from rich.status import Status

from offbeat.benchmarks.generation_http import Agents, GatewayHost
from offbeat.benchmarks.harness.environment import (
    TAG,
    BenchEnvironment,
    bench_environment,
    slow_lake,
)
from offbeat.benchmarks.harness.load import Prompts, RoundLoad, under_load
from offbeat.benchmarks.harness.process_actor import ProcessActor
from offbeat.benchmarks.harness.result import Spread, console, show
from offbeat.deploy.config.run import RunConfig
from offbeat.services.generation.config import Dtype, EngineModelArgs, EngineStrategy, GenerationConfig
from offbeat.services.messages.types import GenerateRequest

SEQUENCE_LENGTH = 512
SHARE_OF_GPU = 0.3
"""Of its memory, for each of the two engines."""
MIN_CLIENTS = 16
"""A shorter round measures how its requests happen to meet."""
SATURATION_SHARE = 0.9
"""Of the bare engine's best rate."""

RoundMeasure = Callable[[int, int], Awaitable[RoundLoad]]
"""(concurrent requests, total requests) -> result."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    model: Path | None = None
    """Hugging Face folder; None: the tiny policy."""
    dtype: Dtype = "float32"
    concurrency: tuple[int, ...] = (1, 4, 16, 64, 256)
    tokens: int = 32
    per_client: int = 8
    """Sequential requests per client and round; a round has those of `MIN_CLIENTS` at least."""
    rounds: int = 3
    coalesce_s: float = 0.01
    http: bool = True
    enforce_eager: bool | None = None
    """None: the engine's default."""
    device: Literal["cpu", "cuda"] = "cpu"


class BareEngine:
    """`AsyncLLM` and its callers in a child process."""

    def __init__(self, config: GenerationConfig, model: Path, tokens: int) -> None:
        self._config = config
        self._model = model
        self._tokens = tokens

    async def start(self) -> None:
        from offbeat.services.generation.vllm.engine import VllmEngine

        engine = await VllmEngine.start(self._config, self._model, sequence_length=SEQUENCE_LENGTH, seed=0)
        self._llm = engine.llm
        self._prompts = Prompts(engine.llm.model_config.get_vocab_size(), self._tokens, seed=1)

    async def measure(self, concurrency: int, count: int) -> RoundLoad:
        return await under_load(self._call, self._prompts.take(count), concurrency)

    async def _call(self, request: GenerateRequest) -> int:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            max_tokens=request.sampling.max_new_tokens,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        prompt = tokens_input(list(request.prompt))
        count = 0
        async for output in self._llm.generate(prompt, parameters, request.request_id):
            count = len(output.outputs[0].token_ids)
        return count

    def close(self) -> None:
        self._llm.shutdown(timeout=0.5)


class Service:
    def __init__(self, run_id: str, options: GenerationOptions, vocab_size: int) -> None:
        from offbeat.services.generation.client import ServeGenerationClient
        from offbeat.services.generation.config import app_name
        from offbeat.services.rollout.episodes.turn_batcher import TurnBatcher

        self._batcher = TurnBatcher(ServeGenerationClient(app_name(run_id)), options.coalesce_s)
        self._prompts = Prompts(vocab_size, options.tokens, seed=2)

    async def measure(self, concurrency: int, count: int) -> RoundLoad:
        return await under_load(self._call, self._prompts.take(count), concurrency)

    async def _call(self, request: GenerateRequest) -> int:
        return len((await self._batcher.sample(request)).token_ids)


def run(options: GenerationOptions) -> dict[str, Any]:
    with console().status("starting") as status, bench_environment() as base:
        config = _run_config(base, options)
        model = options.model or config.output_dir / "policy"
        vocab_size = publish_start(base, config, model)
        with ProcessActor(BareEngine(config.actor_infer, model, options.tokens), base.folder / "bare.log") as bare:
            status.update("starting the service")
            with running_service(base, config, model) as address, ExitStack() as stack:
                service = Service(config.exp_name, options, vocab_size)
                sides: dict[str, RoundMeasure] = {"bare": partial(_remotely, bare), "handle": service.measure}
                if options.http:
                    host = GatewayHost(address, config.exp_name, model, options.coalesce_s)
                    agents = Agents(
                        stack.enter_context(ProcessActor(host, base.folder / "gateway.log")), vocab_size, options.tokens
                    )
                    sides["http"] = agents.measure
                levels = asyncio.run(_levels(options, sides, status))
    result = summary(levels)
    _show(result)
    return result


def _run_config(base: BenchEnvironment, options: GenerationOptions) -> RunConfig:
    first = base.run_config("bench-generation", custom_envs={TAG: slow_lake({})})
    updates = {"max_num_seqs": 256, "gpu_memory_utilization": SHARE_OF_GPU, "enforce_eager": options.enforce_eager}
    engine = first.actor_infer.engine.model_copy(update=updates)
    infer = first.actor_infer.model_copy(
        update={
            "device": options.device,
            "model_args": EngineModelArgs(dtype=options.dtype),
            "strategy_args": EngineStrategy(strategy_config=engine),
        }
    )
    config = first.model_copy(update={"actor_infer": infer})
    base.prepare(config)
    return config


def publish_start(base: BenchEnvironment, config: RunConfig, model: Path) -> int:
    """Publish a model's weights as version 0; return the vocabulary size."""
    from offbeat.services.weights.publisher import RedisWeightPublisher
    from offbeat.trainer.config.actor_train import ModelArgs
    from offbeat.trainer.models.loading import load_policy

    policy = load_policy(model, ModelArgs(), seed=0, temperature=1.0).model
    tied = bool(policy.config.get_text_config().tie_word_embeddings)
    weights = [(n, t) for n, t in policy.state_dict().items() if not (tied and n == "lm_head.weight")]
    with closing(RedisWeightPublisher(base.redis, config.exp_name, config.weights, 1, config.output_dir)) as publisher:
        publisher.publish(0, 0, weights)
    return int(policy.config.get_text_config().vocab_size)


@contextmanager
def running_service(
    base: BenchEnvironment, config: RunConfig, model: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """Start Ray and the service; yield Ray's address. environment: of the replica."""
    import ray
    from ray import serve

    from offbeat.services.generation.app import build
    from offbeat.services.generation.config import app_name

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        application = build(
            config.exp_name,
            config.actor_infer,
            config.weights,
            model=model,
            sequence_length=config.sequence_length,
            redis_url=base.redis_url,
            output_dir=config.output_dir,
            seed=0,
            environment=environment,
        )
        serve.run(application, name=app_name(config.exp_name), route_prefix=None)
        yield ray.get_runtime_context().gcs_address
    finally:
        serve.shutdown()
        ray.shutdown()


async def _remotely(side: ProcessActor, concurrency: int, count: int) -> RoundLoad:
    return await asyncio.to_thread(side.call, "measure", concurrency, count)


async def _levels(
    options: GenerationOptions, sides: dict[str, RoundMeasure], status: Status
) -> dict[int, dict[str, list[RoundLoad]]]:
    results: dict[int, dict[str, list[RoundLoad]]] = {}
    for concurrency in options.concurrency:
        count = max(concurrency, MIN_CLIENTS) * options.per_client
        rounds: dict[str, list[RoundLoad]] = {name: [] for name in sides}
        for number in range(-1, options.rounds):  # the first one warms up
            for name, measure in sides.items():
                status.update(f"{concurrency} requests at a time, round {number + 1}/{options.rounds}, {name}")
                load = await measure(concurrency, count)
                if number >= 0:
                    rounds[name].append(load)
        results[concurrency] = rounds
    return results


def summary(levels: dict[int, dict[str, list[RoundLoad]]]) -> dict[str, Any]:
    """Return medians and ratios per level and at saturation."""
    rows = [
        {
            "concurrency": concurrency,
            **{f"{name}_tokens_per_s": Spread.of(x.tokens_per_s for x in loads) for name, loads in sides.items()},
            **{f"{name}_p50_s": Spread.of(x.p50_s for x in loads).median for name, loads in sides.items()},
            **{f"{name}_p99_s": Spread.of(x.p99_s for x in loads).median for name, loads in sides.items()},
            "ratio": _median(sides["handle"]) / _median(sides["bare"]),
            "http_ratio": _median(sides["http"]) / _median(sides["bare"]) if "http" in sides else None,
        }
        for concurrency, sides in levels.items()
    ]
    best = _best(rows, "bare")
    saturated = [row for row in rows if row["bare_tokens_per_s"].median >= SATURATION_SHARE * best]
    return {
        "levels": rows,
        "saturated_from": saturated[0]["concurrency"],
        "saturated_ratio": _best(rows, "handle") / best,
        "saturated_http_ratio": _best(rows, "http") / best if "http_tokens_per_s" in rows[0] else None,
    }


def _best(rows: Sequence[dict[str, Any]], side: str) -> float:
    return max(row[f"{side}_tokens_per_s"].median for row in rows)


def _median(loads: Sequence[RoundLoad]) -> float:
    return Spread.of(load.tokens_per_s for load in loads).median


def _show(result: dict[str, Any]) -> None:
    levels = result["levels"]
    sides = [side for side in ("bare", "handle", "http") if f"{side}_tokens_per_s" in levels[0]]
    show(
        f"The service against bare AsyncLLM; best rate over best rate {result['saturated_ratio']:.2f} over a handle",
        (
            "at a time",
            *(f"{side} {unit}" for side in sides for unit in ("tokens/s", "p50 s", "p99 s")),
            "handle / bare",
            "http",
        ),
        [
            [
                row["concurrency"],
                *(value for side in sides for value in _of_side(row, side)),
                row["ratio"],
                row["http_ratio"],
            ]
            for row in levels
        ],
    )


def _of_side(row: dict[str, Any], side: str) -> tuple[float, float, float]:
    return row[f"{side}_tokens_per_s"].median, row[f"{side}_p50_s"], row[f"{side}_p99_s"]
