"""Throughput that a staleness bound permits by admission alone.

Queue model: admission by rule C3; groups take as long as their slowest episode; training publishes at once.
"""

import argparse
import heapq
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from offbeat.benchmarks.harness.slow_lake import Latency

UNBOUNDED = 1e6
WARM_UP_STEPS = 5


def rate(bound: float, options: argparse.Namespace, distribution: str, seed: int) -> float:
    """Return trajectories/s under a bound."""
    rng = np.random.default_rng(seed)
    latency = Latency(
        distribution="normal" if distribution == "normal" else "lognormal", mean_s=options.mean, std_s=options.std
    )

    def episode_s() -> float:
        turns = int(rng.integers(options.turns[0], options.turns[1] + 1))
        return sum(latency.draw(rng) + options.answer for _ in range(turns))

    ends = published_at(bound, options, lambda: max(episode_s() for _ in range(options.group_size)))
    return (
        options.groups_per_step
        * options.group_size
        * (len(ends) - WARM_UP_STEPS)
        / (ends[-1] - ends[WARM_UP_STEPS - 1])
    )


def published_at(bound: float, options: argparse.Namespace, group_s: Callable[[], float]) -> list[float]:
    """Return each step's publish time, s."""
    events: list[tuple[float, bool]] = []
    ends: list[float] = []
    admitted = playing = ready = 0
    now, training = 0.0, False
    while len(ends) < options.steps:
        while admitted < (len(ends) + bound + 1) * options.groups_per_step and playing < options.env_groups:
            admitted, playing = admitted + 1, playing + 1
            heapq.heappush(events, (now + group_s(), False))
        if not training and ready >= options.groups_per_step:
            ready, training = ready - options.groups_per_step, True
            heapq.heappush(events, (now + options.train, True))
        now, trained = heapq.heappop(events)
        if trained:
            training = False
            ends.append(now)
        else:
            playing, ready = playing - 1, ready + 1
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mean", type=float, default=0.2, help="of an env's step, s")
    parser.add_argument("--std", type=float, default=0.2, help="of an env's step, s")
    parser.add_argument("--answer", type=float, default=0.02, help="a turn's sampling, s")
    parser.add_argument("--train", type=float, default=0.5, help="a batch, s")
    parser.add_argument("--turns", type=int, nargs=2, default=(3, 12), help="of an episode, evenly between these")
    parser.add_argument("--groups-per-step", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--env-groups", type=int, default=16, help="in play at most")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    for distribution in ("normal", "lognormal"):
        bounds = (0.0, 0.5, 1.0, 2.0, 4.0, UNBOUNDED)
        rates = [float(np.mean([rate(bound, options, distribution, seed) for seed in range(5)])) for bound in bounds]
        table = Table("max_staleness", "trajectories/s", "ratio", "of unbounded", title=distribution)
        for bound, throughput in zip(bounds, rates, strict=True):
            name = "none" if bound == UNBOUNDED else f"{bound:g}"
            table.add_row(name, f"{throughput:.1f}", f"{throughput / rates[0]:.2f}x", f"{throughput / rates[-1]:.2f}")
        Console().print(table)


if __name__ == "__main__":
    main()
