"""Exact success of random, scripted and optimal policies, by dynamic programming."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from offbeat.envs.frozen_lake.env import FrozenLakeConfig, FrozenLakeEnv
from offbeat.envs.frozen_lake.maps import ACTIONS, Cell, LakeMap

Array = npt.NDArray[np.float64]


class LakeBaselines(NamedTuple):
    """Mean probability of reaching the goal."""

    random: float
    scripted: float
    """Moves to a nearer neighbour that is no hole, else to any other."""
    optimal: float


def baselines(seeds: Iterable[int], config: FrozenLakeConfig | None = None, *, max_steps: int = 12) -> LakeBaselines:
    """Average over the maps of `seeds`; raises ValueError without any."""
    env = FrozenLakeEnv(config)
    rows: list[LakeBaselines] = []
    for seed in seeds:
        env.reset(seed=seed)
        rows.append(map_baselines(env.lake, max_steps, is_slippery=env.config.is_slippery))
    if not rows:
        raise ValueError("no seeds, no baselines")
    return LakeBaselines(*(float(value) for value in np.mean(np.array(rows), axis=0)))


def map_baselines(lake: LakeMap, max_steps: int, *, is_slippery: bool = False) -> LakeBaselines:
    moves = transitions(lake, is_slippery=is_slippery)
    start = lake.start[0] * lake.size + lake.start[1]
    uniform = np.full((lake.size**2, len(ACTIONS)), 1 / len(ACTIONS))
    chances = (_success(lake, moves, policy, max_steps)[start] for policy in (uniform, scripted_policy(lake), None))
    return LakeBaselines(*(float(chance) for chance in chances))


def transitions(lake: LakeMap, *, is_slippery: bool) -> Array:
    """Return [action, cell, next cell] probabilities; holes and goal are absorbing."""
    cells = lake.size**2
    moves = np.zeros((len(ACTIONS), cells, cells))
    for index in range(cells):
        at: Cell = divmod(index, lake.size)
        if at in lake.holes or at == lake.goal:
            moves[:, index, index] = 1.0
            continue
        for action in range(len(ACTIONS)):
            slips = (-1, 0, 1) if is_slippery else (0,)
            for slip in slips:
                row, column = lake.neighbour(at, (action + slip) % len(ACTIONS))
                moves[action, index, row * lake.size + column] += 1 / len(slips)
    return moves


def scripted_policy(lake: LakeMap) -> Array:
    """Return [cell, action] probabilities."""
    policy = np.zeros((lake.size**2, len(ACTIONS)))
    for index in range(lake.size**2):
        at: Cell = divmod(index, lake.size)
        neighbours = {action: lake.neighbour(at, action) for action in range(len(ACTIONS))}
        safe = {action: there for action, there in neighbours.items() if there != at and there not in lake.holes}
        nearer = [action for action, there in safe.items() if _distance(there, lake.goal) < _distance(at, lake.goal)]
        chosen = nearer or list(safe) or list(neighbours)
        policy[index, chosen] = 1 / len(chosen)
    return policy


def _distance(a: Cell, b: Cell) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _success(lake: LakeMap, moves: Array, policy: Array | None, max_steps: int) -> Array:
    """Return [cell] success probabilities; `policy` None: optimal."""
    chance = np.zeros(lake.size**2)
    chance[lake.goal[0] * lake.size + lake.goal[1]] = 1.0
    for _ in range(max_steps):
        by_action = moves @ chance
        chance = by_action.max(axis=0) if policy is None else (policy * by_action.T).sum(axis=1)
    return chance
