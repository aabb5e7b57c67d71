"""Sokoban rooms and their moves, forwards (push) and backwards (pull).

A cell is `row * width + column`. Invariant: `pulls` is the exact inverse of `push`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b

HELD_OUT_SHARE = 8
"""One room in this many."""

MOVES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
ACTIONS = tuple(MOVES)
"""Order of gym-sokoban and ROLL."""

Cell = int


@dataclass(frozen=True)
class Room:
    height: int
    width: int
    floor: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    @property
    def is_solved(self) -> bool:
        return self.boxes == self.targets

    @cached_property
    def task_id(self) -> str:
        """Rows in gym-sokoban's numbers."""
        numbers = "".join(str(self.code(cell)) for cell in range(self.height * self.width))
        return "/".join(numbers[row : row + self.width] for row in range(0, len(numbers), self.width))

    @cached_property
    def is_held_out(self) -> bool:
        digest = blake2b(self.task_id.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0

    def code(self, cell: Cell) -> int:
        if cell not in self.floor:
            return 0
        on_target = cell in self.targets
        if cell == self.player:
            return 6 if on_target else 5
        if cell in self.boxes:
            return 3 if on_target else 4
        return 2 if on_target else 1

    def offset(self, action: int) -> int:
        """Return a step's difference in cell number."""
        down, right = MOVES[ACTIONS[action]]
        return down * self.width + right

    def push(self, action: int) -> "Room":
        """Return the position after a step; `self` if blocked."""
        offset = self.offset(action)
        there = self.player + offset
        if there not in self.floor:
            return self
        if there not in self.boxes:
            return replace(self, player=there)
        beyond = there + offset
        if beyond not in self.floor or beyond in self.boxes:
            return self
        return replace(self, player=there, boxes=self.boxes - {there} | {beyond})

    def cell(self, at: Cell) -> tuple[int, int]:
        return divmod(at, self.width)


def pulls(
    floor: frozenset[Cell], player: Cell, boxes: tuple[Cell, ...], offset: int
) -> Iterator[tuple[Cell, tuple[Cell, ...]]]:
    """Yield the predecessors (player, boxes in order) of a step by `offset`."""
    before = player - offset
    if before not in floor or before in boxes:
        return
    yield before, boxes
    ahead = player + offset
    if ahead in boxes:
        yield before, tuple(player if box == ahead else box for box in boxes)


def parse_room(text: str) -> Room:
    """Parse lines of `#` wall, `_` empty, `O` target, `√` box on target, `X` box, `P` player, `S` player on target.

    Raises ValueError for unequal rows, unknown symbols, or not exactly one player.
    """
    rows = [line.split() for line in text.strip().splitlines()]
    if len({len(row) for row in rows}) != 1:
        raise ValueError("the room's rows differ in length")
    codes = ["#_O√XPS".index(symbol) for row in rows for symbol in row]
    players = [cell for cell, code in enumerate(codes) if code >= 5]
    if len(players) != 1:
        raise ValueError(f"a room has one player, this one {len(players)}")

    def cells(*kinds: int) -> frozenset[Cell]:
        return frozenset(cell for cell, code in enumerate(codes) if code in kinds)

    floor = cells(1, 2, 3, 4, 5, 6)
    return Room(len(rows), len(rows[0]), floor, cells(2, 3, 6), cells(3, 4), players[0])
