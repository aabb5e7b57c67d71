"""Exact success of random, scripted and optimal policies, by dynamic programming."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from offbeat.envs.sokoban.env import SokobanConfig, SokobanEnv
from offbeat.envs.sokoban.rooms import ACTIONS, Cell, Room

Array = npt.NDArray[np.float64]

MAX_POSITIONS = 20_000


class RoomBaselines(NamedTuple):
    """Mean probability of solving a room."""

    random: float
    scripted: float
    """Pushes towards the nearest target, else steps towards one."""
    optimal: float


def baselines(
    seeds: Iterable[int], config: SokobanConfig | None = None, *, max_steps: int = 12
) -> RoomBaselines | None:
    """Return the baselines; None if a room exceeds 20,000 positions. Raises ValueError without seeds."""
    env = SokobanEnv(config)
    rows: list[RoomBaselines] = []
    for seed in seeds:
        env.reset(seed=seed)
        result = room_baselines(env.room, max_steps)
        if result is None:
            return None
        rows.append(result)
    if not rows:
        raise ValueError("no seeds, no baselines")
    return RoomBaselines(*(float(value) for value in np.mean(np.array(rows), axis=0)))


def room_baselines(room: Room, max_steps: int) -> RoomBaselines | None:
    positions = _positions(room, max_steps)
    if positions is None:
        return None
    numbers = {position: i for i, position in enumerate(positions)}
    successors = np.array([[numbers.get(p.push(a), i) for a in range(len(ACTIONS))] for i, p in enumerate(positions)])
    solved = np.array([position.is_solved for position in positions])
    uniform = np.full((len(positions), len(ACTIONS)), 1 / len(ACTIONS))
    scripted = np.array([scripted_policy(position) for position in positions])
    chances = (_success(successors, solved, policy, max_steps) for policy in (uniform, scripted, None))
    return RoomBaselines(*(float(chance) for chance in chances))


def scripted_policy(room: Room) -> Array:
    """Return [action] probabilities."""
    pushes = _pushes(room)
    possible = {action for cell, action in pushes if cell == room.player}
    chosen = possible or _steps_towards(room, {cell for cell, _ in pushes}) or set(range(len(ACTIONS)))
    policy = np.zeros(len(ACTIONS))
    policy[sorted(chosen)] = 1 / len(chosen)
    return policy


def _pushes(room: Room) -> set[tuple[Cell, int]]:
    """Return (player's cell, direction) of pushes towards a free target."""
    free = room.targets - room.boxes
    results: set[tuple[Cell, int]] = set()
    for box in room.boxes - room.targets:
        for action in range(len(ACTIONS)):
            stand, there = box - room.offset(action), box + room.offset(action)
            passable = stand in room.floor and stand not in room.boxes and there in room.floor - room.boxes
            if passable and _nearest(room, there, free) < _nearest(room, box, free):
                results.add((stand, action))
    return results


def _nearest(room: Room, cell: Cell, targets: frozenset[Cell]) -> int:
    (row, column), places = room.cell(cell), [room.cell(target) for target in targets]
    return min(abs(row - r) + abs(column - c) for r, c in places)


def _steps_towards(room: Room, goals: set[Cell]) -> set[int]:
    distance, level = dict.fromkeys(goals, 0), goals
    offsets = [room.offset(action) for action in range(len(ACTIONS))]
    while level and room.player not in distance:
        level = {c - o for c in level for o in offsets if c - o in room.floor - room.boxes} - set(distance)
        distance.update(dict.fromkeys(level, 1 + max(distance.values())))
    return {i for i, o in enumerate(offsets) if distance.get(room.player + o, -1) == distance.get(room.player, 0) - 1}


def _positions(room: Room, max_steps: int) -> list[Room] | None:
    """Return all positions within `max_steps` moves, none beyond a solved one; None: too many."""
    visited, level = {room: None}, [room]
    for _ in range(max_steps):
        reached = [p.push(action) for p in level if not p.is_solved for action in range(len(ACTIONS))]
        level = list(dict.fromkeys(position for position in reached if position not in visited))
        visited.update(dict.fromkeys(level))
        if len(visited) > MAX_POSITIONS:
            return None
    return list(visited)


def _success(
    successors: npt.NDArray[np.int64], solved: npt.NDArray[np.bool_], policy: Array | None, turns: int
) -> float:
    """Return the first position's success probability; `policy` None: optimal."""
    chance = solved.astype(np.float64)
    for _ in range(turns):
        by_action = chance[successors]
        best = by_action.max(axis=1) if policy is None else (policy * by_action).sum(axis=1)
        chance = np.where(solved, 1.0, best)
    return float(chance[0])
