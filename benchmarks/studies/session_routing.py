"""Turns of growing episodes on two replicas, by episode and at random: prefix-cache hits, time and CPU per turn.

python -m offbeat.benchmarks.studies.session_routing [--strategy hf_infer] [--rounds N]
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import psutil

from offbeat.benchmarks.generation import publish_start, running_service
from offbeat.benchmarks.harness.environment import TAG, BenchEnvironment, bench_environment, slow_lake
from offbeat.benchmarks.harness.result import console, show
from offbeat.deploy.config.run import RunConfig
from offbeat.services.awake_clock import AwakeClock
from offbeat.services.generation.client import ServeGenerationClient
from offbeat.services.generation.config import EngineStrategy, app_name
from offbeat.services.generation.routing import ReplicaRoute
from offbeat.services.messages.types import GenerateRequest, Sampling
from offbeat.services.rollout.episodes.sampler import EpisodeSampler
from offbeat.services.rollout.episodes.turn_batcher import TurnBatcher
from offbeat.services.telemetry import Partial, RedisMetrics, merge_all

NUM_REPLICAS = 2
GROUPS, GROUP_SIZE = 4, 8
TURNS = 12
FIRST_PROMPT, OBSERVATION, ANSWER = 128, 26, 6
"""Tokens of a group's first prompt, of what a turn adds to it, and of an answer."""
SEQUENCE_LENGTH = FIRST_PROMPT + TURNS * (OBSERVATION + ANSWER)
REPORTED_S = 3.0
"""Longer than the interval of replicas' reports."""


class RandomRouting(ServeGenerationClient):
    """Each call goes to the less busy of two replicas."""

    def route(self, requests: Sequence[GenerateRequest]) -> Sequence[ReplicaRoute]:
        return [ReplicaRoute("", requests)]


async def play(client: ServeGenerationClient, seed: int, vocab_size: int) -> float:
    """Return seconds per turn, of all episodes at once."""
    batcher = TurnBatcher(client, 0.0, clock=AwakeClock(), max_turns=GROUP_SIZE)
    sampling = Sampling(max_new_tokens=ANSWER)
    rng = random.Random(seed)
    starts = [[rng.randrange(vocab_size) for _ in range(FIRST_PROMPT)] for _ in range(GROUPS)]
    spent: list[float] = []

    async def episode(group: int, member: int) -> None:
        draw = random.Random(f"{seed} {group} {member}")
        prompt = list(starts[group])
        with EpisodeSampler(batcher, sampling, 0, retry_s=60.0, group=f"{seed}-{group}") as sample:
            for _ in range(TURNS):
                began = time.monotonic()
                answer = await sample(prompt, ANSWER)
                spent.append(time.monotonic() - began)
                prompt += [*answer.token_ids, *(draw.randrange(vocab_size) for _ in range(OBSERVATION))]

    await asyncio.gather(*(episode(group, member) for group in range(GROUPS) for member in range(GROUP_SIZE)))
    await batcher.close()
    return sum(spent) / len(spent)


def hits(base: BenchEnvironment, run_id: str) -> Partial:
    """Return cached and all prompt tokens so far."""
    records = RedisMetrics(base.redis, run_id).read(count=100_000)
    return merge_all(record.values for _, record in records).get("prefix_cache_hit_rate", Partial("mean", 0.0, 0.0))


async def newest_hits(base: BenchEnvironment, run_id: str, before: Partial) -> Partial:
    """Return the hits once replicas have reported more than `before`, and nothing more."""
    last = before
    while True:
        await asyncio.sleep(REPORTED_S)
        now = hits(base, run_id)
        if now.count > before.count and now.count == last.count:
            return now
        last = now


def replica_cpu_s() -> float:
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        if "ServeReplica" in (command := " ".join(process.cmdline())) or "EngineCore" in command:
            total += sum(process.cpu_times()[:2])
    return total


async def compare(base: BenchEnvironment, run_id: str, vocab_size: int, rounds: int) -> list[list[object]]:
    clients = {"at random": RandomRouting(app_name(run_id)), "by episode": ServeGenerationClient(app_name(run_id))}
    rates: dict[str, list[float]] = {name: [] for name in clients}
    times: dict[str, list[float]] = {name: [] for name in clients}
    cpu: dict[str, list[float]] = {name: [] for name in clients}
    for number in range(-1, rounds):  # the first one warms up
        for name, client in clients.items():
            before, cpu_before = hits(base, run_id), replica_cpu_s()
            seconds = await play(client, number, vocab_size)
            cpu_s = replica_cpu_s() - cpu_before
            after = await newest_hits(base, run_id, before)
            if number >= 0:
                rates[name].append((after.total - before.total) / (after.count - before.count))
                times[name].append(1000 * seconds)
                cpu[name].append(1000 * cpu_s / (GROUPS * GROUP_SIZE * TURNS))
    return [[name, *(f"{statistics.median(each[name]):.3g}" for each in (rates, times, cpu))] for name in clients]


def run_config(base: BenchEnvironment, strategy: str) -> RunConfig:
    first = base.run_config("session-routing", custom_envs={TAG: slow_lake({})}, sequence_length=SEQUENCE_LENGTH)
    infer = first.actor_infer.model_copy(
        update={
            "num_replicas": NUM_REPLICAS,
            "strategy_args": EngineStrategy.model_validate({"strategy_name": strategy}),
        }
    )
    config = first.model_copy(update={"actor_infer": infer})
    base.prepare(config)
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = get_args(EngineStrategy.model_fields["strategy_name"].annotation)
    parser.add_argument("--strategy", choices=names, default="vllm")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with console().status("measuring"), bench_environment() as base:
        config = run_config(base, options.strategy)
        model: Path = config.output_dir / "policy"
        vocab_size = publish_start(base, config, model)
        with running_service(base, config, model):
            rows = asyncio.run(compare(base, config.exp_name, vocab_size, options.rounds))
    title = f"{GROUPS * GROUP_SIZE} episodes of {TURNS} turns, {NUM_REPLICAS} replicas of {options.strategy}"
    show(title, ("routing", "prompt tokens cached", "ms a turn", "replicas' CPU ms a turn"), rows)


if __name__ == "__main__":
    main()
