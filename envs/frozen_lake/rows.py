"""Datasets for the data pipelines, as JSONL: `python -m offbeat.envs.frozen_lake.rows OUT.jsonl [--rows 512] [--pairs]`.

Rows are conversations of careful walks; or, after a part of one, pairs of a step that nears the goal against one that does
not; or (`--unpaired`) either step with a label.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.envs.frozen_lake.baselines import scripted_policy
from offbeat.envs.frozen_lake.demos import careful_wandering
from offbeat.envs.frozen_lake.env import FrozenLakeEnv
from offbeat.envs.frozen_lake.maps import ACTIONS

Row = dict[str, Any]


def conversations(count: int, seed: int = 0) -> Iterator[Row]:
    env, rng = FrozenLakeEnv(), np.random.default_rng(seed)
    for _ in range(count):
        yield {"messages": careful_wandering(env, rng)}


def pairs(count: int, seed: int = 0) -> Iterator[Row]:
    env, rng = FrozenLakeEnv(), np.random.default_rng(seed)
    written = 0
    while written < count:
        messages = careful_wandering(env, rng, max_turns=int(rng.integers(1, 6)))[:-1]
        at = _position_before_last(env, messages)
        wanted = scripted_policy(env.lake)[at[0] * env.lake.size + at[1]]
        good, bad = np.flatnonzero(wanted), np.flatnonzero(wanted == 0)
        if len(bad):
            chosen, rejected = ACTIONS[int(rng.choice(good))], ACTIONS[int(rng.choice(bad))]
            yield {"prompt": messages, "chosen": chosen, "rejected": rejected}
            written += 1


def unpaired(count: int, seed: int = 0) -> Iterator[Row]:
    rng = np.random.default_rng([seed, 1])
    for row in pairs(count, seed):
        label = bool(rng.integers(2))
        yield {"prompt": row["prompt"], "completion": row["chosen" if label else "rejected"], "label": label}


def _position_before_last(env: FrozenLakeEnv, messages: list[dict[str, str]]) -> tuple[int, int]:
    at = env.lake.start
    for message in messages:
        if message["role"] == "assistant":
            at = env.lake.neighbour(at, ACTIONS.index(message["content"]))
    return at


def write_rows(path: Path, rows: Iterator[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--pairs", action="store_const", dest="make", const=pairs)
    kind.add_argument("--unpaired", action="store_const", dest="make", const=unpaired)
    arguments = parser.parse_args()
    make = arguments.make or conversations
    write_rows(arguments.out, make(arguments.rows, arguments.seed))


if __name__ == "__main__":
    main()
