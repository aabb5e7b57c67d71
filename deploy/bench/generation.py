"""`offbeat bench generation`: the generation service against the vLLM engine that is in it.

Real: Redis, Ray Serve, the replica with its broker subscription, vLLM; the client coalesces turns as an env worker does. The
bare side is vLLM's `AsyncLLM` in a process of its own, started with the same arguments, called from its own loop. Both serve
at the same time and are measured in turn, so that a busy machine is equally busy for both; the one that is not measured
waits without using the CPU.

Invariant: both sides get the same prompts, all of them new to the prefix cache, and sample exactly `tokens` tokens each.
"""

import asyncio
import itertools
import logging
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.status import Status

from deploy.bench.ground import TAG, Ground, ground, slow_lake
from deploy.bench.outcome import Spread, console, show
from deploy.bench.servant import Servant
from deploy.config import RunConfig
from services.generation.config import GenerationConfig
from services.schema import GenerateRequest, Sampling

PROMPT_TOKENS = 64
SEQUENCE_LENGTH = 512
SATURATED = 0.9
"""Share of the bare engine's best rate from which on a number of requests counts as saturating it."""

Call = Callable[[GenerateRequest], Awaitable[int]]
"""Sends a request and returns how many tokens came."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured."""

    model: Path | None = None
    """A Hugging Face folder; None is the tiny policy."""
    dtype: str = "float32"
    concurrency: tuple[int, ...] = (1, 4, 16, 64, 256)
    tokens: int = 32
    """Of an answer."""
    per_client: int = 4
    """Requests that each of the concurrent clients sends in a round, one after another."""
    rounds: int = 3
    coalesce_s: float = 0.01
    """See `rollout.coalesce_s`."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one round showed."""

    tokens_per_s: float
    p50_s: float
    p99_s: float


class Prompts:
    """Requests that were never sent before."""

    def __init__(self, vocab_size: int, tokens: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size
        self._sampling = Sampling(max_new_tokens=tokens)
        self._numbers = (f"{seed}-{number}" for number in itertools.count())

    def take(self, count: int) -> list[GenerateRequest]:
        """The next `count`."""
        return [self._make() for _ in range(count)]

    def _make(self) -> GenerateRequest:
        prompt = tuple(self._random.randrange(self._vocab_size) for _ in range(PROMPT_TOKENS))
        return GenerateRequest(next(self._numbers), prompt, self._sampling)


async def under_load(call: Call, requests: Sequence[GenerateRequest], concurrency: int) -> Load:
    """Send all requests, `concurrency` at a time."""
    waiting = iter(requests)
    latencies: list[float] = []
    tokens = 0

    async def client() -> None:
        nonlocal tokens
        for request in waiting:
            began = time.monotonic()
            count = await call(request)  # not `tokens += await ...`, which would add to what it was before
            tokens += count
            latencies.append(time.monotonic() - began)

    began = time.monotonic()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    wall_s = time.monotonic() - began
    return Load(tokens / wall_s, quantile(latencies, 0.5), quantile(latencies, 0.99))


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


class BareEngine:
    """In its own process: vLLM's `AsyncLLM`, and who calls it."""

    def __init__(self, config: GenerationConfig, model: Path, tokens: int) -> None:
        self._config = config
        self._model = model
        self._tokens = tokens

    async def start(self) -> None:
        from services.generation.engine import VllmEngine

        engine = await VllmEngine.start(self._config, self._model, sequence_length=SEQUENCE_LENGTH, seed=0)
        self._llm = engine.llm
        self._prompts = Prompts(engine.llm.model_config.get_vocab_size(), self._tokens, seed=1)

    async def measure(self, concurrency: int, count: int) -> Load:
        """One round."""
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
    """The service as an env worker reaches it."""

    def __init__(self, run_id: str, options: Options, vocab_size: int) -> None:
        from services.generation.client import ServeGenerationClient
        from services.generation.config import app_name
        from services.rollout.batcher import TurnBatcher

        self._batcher = TurnBatcher(ServeGenerationClient(app_name(run_id)), options.coalesce_s)
        self._prompts = Prompts(vocab_size, options.tokens, seed=2)

    async def measure(self, concurrency: int, count: int) -> Load:
        """One round."""
        return await under_load(self._call, self._prompts.take(count), concurrency)

    async def _call(self, request: GenerateRequest) -> int:
        return len((await self._batcher.sample(request)).token_ids)


def run(options: Options) -> dict[str, Any]:
    """Measure everything and show it; returns what goes into the JSON."""
    with console().status("starting") as status, ground() as base:
        config = _run_config(base, options)
        model = options.model or config.output_dir / "policy"
        vocab_size = _publish_start(base, config, model)
        with Servant(BareEngine(config.actor_infer, model, options.tokens), base.folder / "bare.log") as bare:
            status.update("starting the service")
            with _service(base, config, model):
                levels = asyncio.run(_levels(options, bare, config.exp_name, vocab_size, status))
    result = summary(levels)
    _show(result)
    return result


def _run_config(base: Ground, options: Options) -> RunConfig:
    first = base.run_config("bench-generation", custom_envs={TAG: slow_lake({})})
    infer = first.actor_infer.model_copy(update={"dtype": options.dtype, "max_num_seqs": 256})
    config = first.model_copy(update={"actor_infer": infer})
    base.prepare(config)
    return config


def _publish_start(base: Ground, config: RunConfig, model: Path) -> int:
    """Version 0 through the broker, as a learner does; returns the size of the vocabulary."""
    from services.weights.publisher import RedisWeightPublisher
    from trainer.config import ModelArgs
    from trainer.models.policy import load_policy

    policy = load_policy(model, ModelArgs(), seed=0, temperature=1.0).model
    tied = bool(policy.config.get_text_config().tie_word_embeddings)
    weights = [(n, t) for n, t in policy.state_dict().items() if not (tied and n == "lm_head.weight")]
    publisher = RedisWeightPublisher(base.redis, config.exp_name, config.weights, 1, config.output_dir)
    publisher.publish(0, 0, weights)
    publisher.close()
    return int(policy.config.get_text_config().vocab_size)


@contextmanager
def _service(base: Ground, config: RunConfig, model: Path) -> Iterator[None]:
    import ray
    from ray import serve

    from services.generation.app import build
    from services.generation.config import app_name

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        application = build(
            config.exp_name,
            config.actor_infer,
            config.weights,
            model=model,
            sequence_length=SEQUENCE_LENGTH,
            redis_url=base.redis_url,
            output_dir=config.output_dir,
            seed=0,
        )
        serve.run(application, name=app_name(config.exp_name), route_prefix=None)
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


async def _levels(
    options: Options, bare: Servant, run_id: str, vocab_size: int, status: Status
) -> dict[int, dict[str, list[Load]]]:
    service = Service(run_id, options, vocab_size)
    seen: dict[int, dict[str, list[Load]]] = {}
    for concurrency in options.concurrency:
        count = concurrency * options.per_client if concurrency > 1 else 2 * options.per_client
        rounds: dict[str, list[Load]] = {"bare": [], "handle": []}
        for number in range(-1, options.rounds):  # the first one warms up
            status.update(f"{concurrency} requests at a time, round {number + 1}/{options.rounds}")
            sides = (
                ("bare", await asyncio.to_thread(bare.call, "measure", concurrency, count)),
                ("handle", await service.measure(concurrency, count)),
            )
            for name, load in sides if number >= 0 else ():
                rounds[name].append(load)
        seen[concurrency] = rounds
    return seen


def summary(levels: dict[int, dict[str, list[Load]]]) -> dict[str, Any]:
    """Medians and ratios of each level, and the ratio where the bare engine is saturated."""
    rows = [
        {
            "concurrency": concurrency,
            **{f"{name}_tokens_per_s": Spread.of(x.tokens_per_s for x in loads) for name, loads in sides.items()},
            **{f"{name}_p50_s": Spread.of(x.p50_s for x in loads).median for name, loads in sides.items()},
            **{f"{name}_p99_s": Spread.of(x.p99_s for x in loads).median for name, loads in sides.items()},
            "ratio": _median(sides["handle"]) / _median(sides["bare"]),
        }
        for concurrency, sides in levels.items()
    ]
    best = max(row["bare_tokens_per_s"].median for row in rows)
    saturated = [row for row in rows if row["bare_tokens_per_s"].median >= SATURATED * best]
    return {"levels": rows, "saturated_from": saturated[0]["concurrency"], "saturated_ratio": _best_ratio(rows)}


def _best_ratio(rows: Sequence[dict[str, Any]]) -> float:
    """The service's best rate over the bare engine's best."""
    best = {side: max(row[f"{side}_tokens_per_s"].median for row in rows) for side in ("bare", "handle")}
    return best["handle"] / best["bare"]


def _median(loads: Sequence[Load]) -> float:
    return Spread.of(load.tokens_per_s for load in loads).median


def _show(result: dict[str, Any]) -> None:
    show(
        f"The service over a Serve handle against bare AsyncLLM; best rate over best rate {result['saturated_ratio']:.2f}",
        ("at a time", "bare tokens/s", "service tokens/s", "ratio", "bare p50 s", "p99", "service p50 s", "p99"),
        [
            [
                row["concurrency"],
                row["bare_tokens_per_s"].median,
                row["handle_tokens_per_s"].median,
                row["ratio"],
                row["bare_p50_s"],
                row["bare_p99_s"],
                row["handle_p50_s"],
                row["handle_p99_s"],
            ]
            for row in result["levels"]
        ],
    )
