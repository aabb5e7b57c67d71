"""Random, solvable FrozenLake maps.

Invariant: the digest of its cells determines a map's split.
"""

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Literal

import numpy as np

Split = Literal["train", "held_out", "any"]
Cell = tuple[int, int]
"""Row and column, from the top left."""

HELD_OUT_SHARE = 8
"""One map in this many."""
MAX_DRAWS = 10_000

MOVES: dict[str, Cell] = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
ACTIONS = tuple(MOVES)
"""Gymnasium's order; slips lead to neighbours in it."""


@dataclass(frozen=True)
class LakeMap:
    size: int
    holes: frozenset[Cell]
    start: Cell
    goal: Cell

    @cached_property
    def task_id(self) -> str:
        """Rows of the map."""
        return "/".join("".join(self.cell((row, column)) for column in range(self.size)) for row in range(self.size))

    @cached_property
    def is_held_out(self) -> bool:
        digest = blake2b(self.task_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0

    def cell(self, at: Cell, agent: Cell | None = None) -> str:
        """Return a cell's symbol: `P` agent (or start), `G` goal, `O` hole, `_` ice, `#` outside."""
        if not (0 <= at[0] < self.size and 0 <= at[1] < self.size):
            return "#"
        if at == (self.start if agent is None else agent):
            return "P"
        if at == self.goal:
            return "G"
        return "O" if at in self.holes else "_"

    def neighbour(self, at: Cell, action: int) -> Cell:
        """Return the cell after a step, unchanged at the edge."""
        row, column = MOVES[ACTIONS[action]]
        there = at[0] + row, at[1] + column
        return there if 0 <= there[0] < self.size and 0 <= there[1] < self.size else at

    def is_solvable(self) -> bool:
        visited, frontier = {self.start}, [self.start]
        while frontier:
            at = frontier.pop()
            for action in range(len(ACTIONS)):
                there = self.neighbour(at, action)
                if there == self.goal:
                    return True
                if there not in visited and there not in self.holes:
                    visited.add(there)
                    frontier.append(there)
        return False


def draw_map(
    rng: np.random.Generator, size: int, p: float, placement: Literal["corners", "random"], split: Split
) -> LakeMap:
    """Return a random solvable map. p, placement: as `FrozenLakeConfig.p` and `start_goal`.

    Raises RuntimeError after 10,000 draws.
    """
    for _ in range(MAX_DRAWS):
        start, goal = (0, 0), (size - 1, size - 1)
        if placement == "random":
            first, second = (int(i) for i in rng.choice(size * size, size=2, replace=False))
            start, goal = divmod(first, size), divmod(second, size)
        frozen = rng.random((size, size)) < p
        holes = {(int(row), int(column)) for row, column in np.argwhere(~frozen)} - {start, goal}
        lake = LakeMap(size, frozenset(holes), start, goal)
        if split in ("any", "held_out" if lake.is_held_out else "train") and lake.is_solvable():
            return lake
    raise RuntimeError(
        f"no solvable {size}x{size} map of split {split!r} with p={p:g} in {MAX_DRAWS:,} draws: use a larger p or size"
    )
