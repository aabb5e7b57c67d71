"""`offbeat bench console`: REST calls, the page, and its cost, on a long active run."""

import asyncio
from dataclasses import asdict, dataclass
from typing import Any

from redis import Redis

from offbeat.benchmarks.console.calls import CallTimes, measure_calls
from offbeat.benchmarks.console.made_run import GROUP_SIZE, GROUPS_PER_STEP, MadeRun, MadeStep
from offbeat.benchmarks.console.page import Cost, Picture, chromium, measure_cost, measure_pictures
from offbeat.benchmarks.console.service import ServiceProcess
from offbeat.benchmarks.harness.environment import QUICKSTART, BenchEnvironment, bench_environment
from offbeat.benchmarks.harness.result import console, show
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.run_setup import run_spec
from offbeat.services.buffer.scripts import BufferKeys
from offbeat.services.control.run import RunState
from offbeat.services.control.store import RunStore
from offbeat.services.redis.connection import connect_async
from offbeat.services.telemetry import RedisMetrics

RUN = "long"


@dataclass(frozen=True, slots=True)
class ConsoleOptions:
    steps: int = 10_000
    tokens: int = 512
    """Of a trajectory."""
    rounds: int = 10
    watch_s: int = 15
    """For each view's cost."""


def run(options: ConsoleOptions) -> dict[str, Any]:
    with bench_environment() as env:
        made = MadeRun(env.folder / RUN, QUICKSTART, name=RUN, steps=options.steps, tokens=options.tokens)
        try:
            return _measure(env, made, options)
        finally:
            made.close()


def _measure(env: BenchEnvironment, made: MadeRun, options: ConsoleOptions) -> dict[str, Any]:
    steps = [made.add() for _ in range(options.steps)]
    made.flush()
    group = steps[-1].taken.groups[0].number
    uid = asyncio.run(_record(env.redis_url, made.config))

    def add_step() -> int:
        step = made.add()
        made.flush()
        _publish(env.redis, uid, step)
        return step.taken.groups[0].number

    with ServiceProcess(env.redis_url, log=env.folder / "service.log") as service, chromium() as browser:
        pictures = [] if browser is None else measure_pictures(browser, service.url, RUN, group)
        measured = measure_calls(service.url, RUN, options.rounds, add_step=add_step)
        newest = made.step
        costs = measure_cost(browser, service, RUN, options.watch_s, add_step=add_step)
    _show(options, measured, pictures, costs)
    if not pictures:
        console().print("the page is left out: `make browser` installs what it needs")
    return {
        "trajectories": GROUPS_PER_STEP * GROUP_SIZE * newest,
        "calls": [asdict(each) for each in measured],
        "pictures": [asdict(each) for each in pictures],
        "costs": [asdict(each) for each in costs],
    }


async def _record(redis_url: str, config: RunConfig) -> str:
    redis = connect_async(redis_url)
    store = RunStore(redis)
    record, _ = await store.create(run_spec(config))
    await store.update(config.exp_name, state=RunState.RUNNING)
    await redis.aclose()
    return record.uid


def _publish(redis: Redis, uid: str, step: MadeStep) -> None:
    RedisMetrics(redis, RUN, uid).append(step.record)
    for event in step.events:
        fields = {"i": event.ordinal, "n": event.number, "e": event.event, "d": event.detail}
        redis.xadd(BufferKeys(RUN).life, fields)  # pyright: ignore[reportArgumentType]


def _show(options: ConsoleOptions, measured: list[CallTimes], pictures: list[Picture], costs: list[Cost]) -> None:
    rows = [(each.name, each.first_ms, each.ms.median, each.ms.high, each.bytes / 1000) for each in measured]
    title = f"REST: {options.steps:,} steps of {GROUPS_PER_STEP * GROUP_SIZE} trajectories, one more before each call"
    show(title, ("call", "first, ms", "median, ms", "worst, ms", "kB"), rows)
    if pictures:
        rows = [(each.name, each.first_ms, each.again_ms, each.bytes / 1000) for each in pictures]
        show("Page: until the picture is there", ("view", "empty browser, ms", "by a link, ms", "kB"), rows)
    show(
        "Service while a step a second arrives", ("who looks on", "% of a core"), [(e.name, 100 * e.cpu) for e in costs]
    )
