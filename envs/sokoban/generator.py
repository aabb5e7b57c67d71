"""Room generator: floor dug by a random walk, then reverse play from the solved position.

Invariant: every room is solvable in at most `search_depth` moves.
"""

from typing import Literal, NamedTuple

import numpy as np

from offbeat.envs.sokoban.rooms import Cell, Room, pulls

Split = Literal["train", "held_out", "any"]

MAX_DRAWS = 2_000
BEAM = 64
"""Of the backward search, sampled."""
TURN_CHANCE = 0.35
"""Probability of a turn per step."""
MASKS = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, 0), (0, 1), (1, 0), (1, 1)),
    ((0, 0), (0, 1), (-1, 0)),
)
"""Cells dug around each step (gym-sokoban)."""

State = tuple[Cell, tuple[Cell, ...]]
"""Player, and boxes in target order."""


class _SearchState(NamedTuple):
    state: State
    num_pulls: int


def make_room(
    rng: np.random.Generator, dim_room: tuple[int, int], num_boxes: int, search_depth: int, split: Split
) -> Room:
    """Return a random room with no box on a target. dim_room: includes walls. search_depth: maximum reverse moves.

    Raises RuntimeError after 2,000 draws.
    """
    for _ in range(MAX_DRAWS):
        floor = dig(rng, dim_room)
        if len(floor) < 2 * num_boxes + 1:
            continue
        cells = [int(cell) for cell in rng.choice(sorted(floor), size=num_boxes + 1, replace=False)]
        targets, player = tuple(cells[:-1]), cells[-1]
        position = search_backwards(rng, floor, (player, targets), dim_room[1], search_depth)
        if position is None:
            continue
        player, boxes = position
        room = Room(*dim_room, floor, frozenset(targets), frozenset(boxes), player)
        if split in ("any", "held_out" if room.is_held_out else "train"):
            return room
    raise RuntimeError(
        f"no room of {dim_room[0]}x{dim_room[1]} with {num_boxes} box(es) and search_depth {search_depth} in split "
        f"{split!r} in {MAX_DRAWS:,} draws: use a larger dim_room or search_depth, or fewer boxes"
    )


def dig(rng: np.random.Generator, dim_room: tuple[int, int]) -> frozenset[Cell]:
    """Return a connected floor inside walls."""
    height, width = dim_room
    row, column = int(rng.integers(1, height - 1)), int(rng.integers(1, width - 1))
    steps = ((-1, 0), (1, 0), (0, -1), (0, 1))
    direction = steps[int(rng.integers(4))]
    floor: set[Cell] = set()
    for _ in range(int(1.5 * (height + width))):
        for down, right in MASKS[int(rng.integers(len(MASKS)))]:
            if 0 < row + down < height - 1 and 0 < column + right < width - 1:
                floor.add((row + down) * width + column + right)
        if rng.random() < TURN_CHANCE:
            direction = steps[int(rng.integers(4))]
        row = min(max(row + direction[0], 1), height - 2)
        column = min(max(column + direction[1], 1), width - 2)
        floor.add(row * width + column)
    return frozenset(floor)


def search_backwards(
    rng: np.random.Generator, floor: frozenset[Cell], solved: State, width: int, search_depth: int
) -> State | None:
    """Search backwards from the solved position for the farthest without boxes on targets.

    Farthest: most pulls times box distances (gym-sokoban); ties are random.
    """
    targets = solved[1]
    visited, level = {solved}, [_SearchState(solved, 0)]
    best: list[State] = []
    best_score = 0
    for _ in range(search_depth):
        level = _expand_backwards(floor, level, width, visited)
        if not level:
            break
        for state, num_pulls in level:
            score = 0 if set(state[1]) & set(targets) else num_pulls * _displacement(state[1], targets, width)
            if score > best_score:
                best, best_score = [], score
            if score and score == best_score:
                best.append(state)
        if len(level) > BEAM:
            level = [level[int(i)] for i in rng.choice(len(level), size=BEAM, replace=False)]
    return best[int(rng.integers(len(best)))] if best else None


def _expand_backwards(
    floor: frozenset[Cell], level: list[_SearchState], width: int, visited: set[State]
) -> list[_SearchState]:
    reached: list[_SearchState] = []
    for (player, boxes), num_pulls in level:
        for offset in (-width, width, -1, 1):
            for state in pulls(floor, player, boxes, offset):
                if state not in visited:
                    visited.add(state)
                    reached.append(_SearchState(state, num_pulls + (state[1] != boxes)))
    return reached


def _displacement(boxes: tuple[Cell, ...], targets: tuple[Cell, ...], width: int) -> int:
    total = 0
    for box, target in zip(boxes, targets, strict=True):
        (row, column), (target_row, target_column) = divmod(box, width), divmod(target, width)
        total += abs(row - target_row) + abs(column - target_column)
    return total
