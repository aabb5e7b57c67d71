"""`offbeat bench buffer`: groups/s of the trajectory buffer, plain redis-py and Reverb (in memory).

Invariant: a round counts only if everything came out intact.
"""

import gc
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.benchmarks.buffer.backends import measure_cpu, offbeat_side, raw_side
from offbeat.benchmarks.buffer.load import (
    GroupLoad,
    Rates,
    Side,
    make_load,
)
from offbeat.benchmarks.buffer.reverb import REVERB_VENV, Reverb, ReverbError
from offbeat.benchmarks.harness.environment import BenchEnvironment, bench_environment
from offbeat.benchmarks.harness.result import Spread, console, show
from offbeat.benchmarks.harness.venv import VenvError
from offbeat.services.buffer.config import RedisConfig
from offbeat.services.redis.connection import connect
from offbeat.services.redis.server import EmbeddedRedis

OURS = "offbeat"
ALWAYS = "appendfsync always"
PARTS = ("into", "out", "both")


@dataclass(frozen=True, slots=True)
class BufferOptions:
    batches: int = 32
    batch: int = 8
    group_size: int = 8
    tokens: tuple[int, ...] = (256, 4096)
    in_hand: int = 64
    """Trajectories submitted concurrently."""
    rounds: int = 5
    reverb: bool = True
    fsync: bool = False
    venv: Path | None = None
    """Of Reverb; None: in the user's cache."""


def run(options: BufferOptions) -> dict[str, Any]:
    with console().status("starting") as status, ExitStack() as stack:
        base = stack.enter_context(bench_environment())
        on_redis: dict[str, Side] = {
            OURS: offbeat_side(base.redis, base.redis_url),
            "raw": raw_side(base.redis, base.redis_url, pipelined=False),
            "raw_codec": raw_side(base.redis, base.redis_url, pipelined=False, codec=True),
            "raw_pipelined": raw_side(base.redis, base.redis_url, pipelined=True),
        }
        sides = {name: measure_cpu(side, base.redis) for name, side in on_redis.items()}
        if options.fsync:
            sides[ALWAYS] = _synced_side(base, stack)
        refusal = "not asked for"
        if options.reverb:
            status.update("starting Reverb (the first time, its venv is made: minutes)")
            reverb, refusal = _reverb(options, base, stack)
            sides |= {"reverb": reverb.side} if reverb else {}
        rows = [_measure(options, tokens, sides, status.update) for tokens in options.tokens]
    for row in rows:
        _show(row)
    if refusal:
        console().print(f"Reverb is left out: {refusal}", markup=False)
    return {"loads": rows, "reverb_left_out": refusal}


def _synced_side(base: BenchEnvironment, stack: ExitStack) -> Side:
    """Return the buffer on a server of its own that syncs before it answers a write."""
    server = stack.enter_context(EmbeddedRedis(base.folder / "redis-always", RedisConfig(appendfsync="always")))
    redis = stack.enter_context(connect(server.url))
    return measure_cpu(offbeat_side(redis, server.url), redis)


def _reverb(options: BufferOptions, base: BenchEnvironment, stack: ExitStack) -> tuple[Reverb | None, str]:
    try:
        python = REVERB_VENV.ensure(options.venv or REVERB_VENV.default_folder())
        return stack.enter_context(Reverb(python, base.folder / "reverb.log")), ""
    except (VenvError, ReverbError) as error:
        return None, str(error)


def _measure(
    options: BufferOptions, tokens: int, sides: dict[str, Side], echo: Callable[[str], None]
) -> dict[str, Any]:
    load = make_load(
        groups=options.batches * options.batch,
        group_size=options.group_size,
        tokens=tokens,
        in_hand=options.in_hand,
        batch=options.batch,
    )
    gc.collect()
    gc.freeze()  # the load is the benchmark's own: no side pays for the collector's walking it
    for side in sides.values():
        side(load.first(options.batch))  # imports, connections, scripts
    rates: dict[str, list[Rates]] = {name: [] for name in sides}
    for number in range(options.rounds):
        names = list(sides)
        random.Random(number).shuffle(names)  # no side always follows the same one
        for name in names:
            echo(f"{tokens} tokens, round {number + 1} of {options.rounds}: {name}")
            rates[name].append(sides[name](load))
    return {"tokens": tokens, "bytes_per_group": _bytes_per_group(load), **summary(rates)}


def _bytes_per_group(load: GroupLoad) -> float:
    return sum(len(blob) for row in load.blobs for blob in row) / load.num_groups


def summary(rates: dict[str, list[Rates]]) -> dict[str, Any]:
    """Return spreads, and ratios within rounds."""
    sides = {name: {part: _spread(rounds, part) for part in PARTS} for name, rounds in rates.items()}
    for name, rounds in rates.items():
        spent = [rates.cpu_us for rates in rounds if rates.cpu_us is not None]
        sides[name] |= {"cpu_us": Spread.of(spent)} if spent else {}
    ratios = {
        name: {part: _ratio(rates[OURS], rounds, part) for part in PARTS}
        for name, rounds in rates.items()
        if name != OURS
    }
    return {"sides": sides, "ratios": ratios}


def _spread(rounds: list[Rates], part: str) -> Spread:
    return Spread.of(getattr(rates, part) for rates in rounds)


def _ratio(ours: list[Rates], theirs: list[Rates], part: str) -> Spread:
    return Spread.of(getattr(a, part) / getattr(b, part) for a, b in zip(ours, theirs, strict=True))


def _show(row: dict[str, Any]) -> None:
    rows: list[list[Any]] = []
    for name, rates in row["sides"].items():
        ratio = row["ratios"].get(name)
        over = (ratio[part].median if ratio else None for part in PARTS)
        cpu_us = rates["cpu_us"].median if "cpu_us" in rates else None
        rows.append([name, *(rates[part].median for part in PARTS), cpu_us, *over])
    kib = row["bytes_per_group"] / 1024
    show(
        f"Groups/s, {row['tokens']} tokens a trajectory ({kib:.0f} KiB a group); ours / theirs, median of rounds",
        ("side", "in", "out", "in and out", "CPU us/trajectory", "ours / theirs: in", "out", "in and out"),
        rows,
    )
