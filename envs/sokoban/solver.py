"""Shortest solutions by breadth-first search, independent of the generator."""

from offbeat.envs.sokoban.rooms import (
    ACTIONS,
    Cell,
    Room,
    pulls,
)

MAX_POSITIONS = 500_000


def solve(room: Room, *, max_moves: int | None = None) -> list[int] | None:
    """Return a shortest solution within `max_moves`, if any; raises RuntimeError after 500,000 positions."""
    if room.is_solved:
        return []
    predecessors: dict[tuple[int, frozenset[int]], tuple[Room, int] | None] = {(room.player, room.boxes): None}
    level, depth = [room], 0
    while level and (max_moves is None or depth < max_moves):
        depth += 1
        reached: list[Room] = []
        for position in level:
            for action in range(len(ACTIONS)):
                after = position.push(action)
                key = after.player, after.boxes
                if key in predecessors:
                    continue
                predecessors[key] = position, action
                if after.is_solved:
                    return _actions(predecessors, after)
                reached.append(after)
        if len(predecessors) > MAX_POSITIONS:
            raise RuntimeError(f"no solution among the first {len(predecessors):,} positions")
        level = reached
    return None


def distances(room: Room) -> dict[tuple[Cell, frozenset[Cell]], int]:
    """Return the moves to the solution by solvable (player, boxes); raises RuntimeError beyond 500,000 positions."""
    distance_by_state = {(player, room.targets): 0 for player in room.floor - room.targets}
    level, depth = list(distance_by_state), 0
    while level:
        depth += 1
        reached: list[tuple[Cell, frozenset[Cell]]] = []
        for player, boxes in level:
            for action in range(len(ACTIONS)):
                for before, moved in pulls(room.floor, player, tuple(boxes), room.offset(action)):
                    key = before, frozenset(moved)
                    if key not in distance_by_state and key[1] != room.targets:
                        distance_by_state[key] = depth
                        reached.append(key)
        if len(distance_by_state) > MAX_POSITIONS:
            raise RuntimeError(f"more than {MAX_POSITIONS:,} positions from which this room can be solved")
        level = reached
    return distance_by_state


def _actions(predecessors: dict[tuple[int, frozenset[int]], tuple[Room, int] | None], room: Room) -> list[int]:
    actions: list[int] = []
    step = predecessors[room.player, room.boxes]
    while step is not None:
        room, action = step
        actions.append(action)
        step = predecessors[room.player, room.boxes]
    return actions[::-1]
