import numpy as np
import pytest

from offbeat.envs.sokoban.generator import make_room
from offbeat.envs.sokoban.rooms import ACTIONS, Room, parse_room
from offbeat.envs.sokoban.solver import solve

UP, DOWN, LEFT, RIGHT = range(4)

ROOM = """
# # # # # #
# _ _ O _ #
# P X _ _ #
# _ _ _ # #
# # # # # #
"""


def rooms(count: int, **changes: object) -> list[Room]:
    settings = {"dim_room": (6, 6), "num_boxes": 1, "search_depth": 30, "split": "any", **changes}
    return [make_room(np.random.default_rng(seed), **settings) for seed in range(count)]


def after(room: Room, actions: list[int]) -> Room:
    for action in actions:
        room = room.push(action)
    return room


@pytest.mark.parametrize(
    ("settings", "count"),
    [({}, 60), ({"num_boxes": 2}, 25), ({"num_boxes": 3, "search_depth": 15}, 8), ({"dim_room": (5, 9)}, 20)],
)
def test_an_independent_solver_solves_every_room_in_search_depth(settings, count):
    for room in rooms(count, **settings):
        solution = solve(room)
        assert solution is not None
        assert 0 < len(solution) <= settings.get("search_depth", 30)
        assert after(room, solution).is_solved


def test_a_room_is_walled_with_equal_boxes_and_targets_none_solved():
    for room in rooms(40, num_boxes=2, dim_room=(6, 7)):
        edge = {cell for cell in range(42) if cell // 7 in (0, 5) or cell % 7 in (0, 6)}
        assert not room.floor & edge
        assert len(room.boxes) == len(room.targets) == 2
        assert not room.boxes & room.targets
        assert room.boxes | room.targets | {room.player} <= room.floor
        assert room.player not in room.boxes


def test_a_smaller_search_depth_makes_shorter_solutions():
    shallow = [len(solve(room)) for room in rooms(40, search_depth=4)]
    deep = [len(solve(room)) for room in rooms(40, search_depth=30)]
    assert max(shallow) <= 4 < np.mean(deep)


def test_held_out_rooms_never_occur_in_training():
    train, held_out = rooms(80, split="train", search_depth=6), rooms(80, split="held_out", search_depth=6)
    assert not any(room.is_held_out for room in train)
    assert all(room.is_held_out for room in held_out)
    assert not {room.task_id for room in train} & {room.task_id for room in held_out}


def test_rooms_depend_on_the_seed_alone():
    assert rooms(20) == rooms(20)
    assert len({room.task_id for room in rooms(60)}) > 55


def test_a_room_too_small_for_its_boxes_is_refused():
    with pytest.raises(RuntimeError, match="larger dim_room or search_depth"):
        make_room(np.random.default_rng(0), (4, 4), 2, 30, "any")


def test_boxes_are_pushed_and_never_pulled_through_walls_or_each_other():
    room = parse_room(ROOM)
    assert room.push(LEFT) is room
    pushed = room.push(RIGHT)
    assert (pushed.cell(pushed.player), {pushed.cell(box) for box in pushed.boxes}) == ((2, 2), {(2, 3)})
    back = pushed.push(LEFT)
    assert back.boxes == pushed.boxes
    at_the_wall = after(pushed, [RIGHT])
    assert at_the_wall.push(RIGHT) is at_the_wall
    two = parse_room("# # # # # #\n# P X X _ #\n# O O _ _ #\n# # # # # #")
    assert two.push(RIGHT) is two


def test_the_solver_finds_a_shortest_solution_and_none_where_there_is_none():
    room = parse_room(ROOM)
    assert solve(room) == [RIGHT, DOWN, RIGHT, UP]
    assert solve(room, max_moves=3) is None
    assert solve(parse_room("# # # #\n# X P #\n# _ O #\n# # # #")) is None
    assert solve(after(room, solve(room))) == []


def test_a_rendered_room_parses_back():
    room = parse_room("# # # # #\n# √ S X #\n# _ _ O #\n# _ X _ #\n# # # # #")
    assert room.task_id == "00000/03640/01120/01410/00000"
    assert len(ACTIONS) == 4
    with pytest.raises(ValueError, match="one player"):
        parse_room("# # #\n# _ #\n# # #")
