from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.envs.frozen_lake.maps import LakeMap, draw_map


def distance_to_goal(lake: LakeMap) -> int | None:
    """Breadth-first search written apart from the code's own."""
    queue, visited = deque([(lake.start, 0)]), {lake.start}
    while queue:
        (row, column), steps = queue.popleft()
        if (row, column) == lake.goal:
            return steps
        for there in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            is_inside = 0 <= there[0] < lake.size and 0 <= there[1] < lake.size
            if is_inside and there not in visited and there not in lake.holes:
                visited.add(there)
                queue.append((there, steps + 1))
    return None


@given(
    st.integers(0, 2**32), st.integers(2, 8), st.sampled_from(["corners", "random"]), st.sampled_from(["train", "any"])
)
@settings(max_examples=60, deadline=None)
def test_every_map_can_be_solved(seed: int, size: int, placement: str, split: str):
    lake = draw_map(np.random.default_rng(seed), size, 0.7, placement, split)
    assert distance_to_goal(lake) is not None
    assert lake.start != lake.goal
    assert not {lake.start, lake.goal} & lake.holes
    assert (lake.start == (0, 0) and lake.goal == (size - 1, size - 1)) or placement == "random"


def test_splits_share_no_map_and_cover_all_maps():
    rng = np.random.default_rng(0)
    maps = {
        split: {draw_map(rng, 3, 0.7, "corners", split).task_id for _ in range(600)}
        for split in ("train", "held_out", "any")
    }
    assert maps["train"]
    assert maps["held_out"]
    assert not maps["train"] & maps["held_out"]
    assert maps["any"] & maps["train"]
    assert maps["any"] & maps["held_out"]


def test_about_an_eighth_of_the_maps_is_held_out():
    rng = np.random.default_rng(1)
    maps = {lake.task_id: lake for lake in (draw_map(rng, 5, 0.7, "corners", "any") for _ in range(3000))}
    share = sum(lake.is_held_out for lake in maps.values()) / len(maps)
    assert 0.1 < share < 0.15


def test_which_maps_are_held_out_is_the_same_on_every_machine():
    lake = LakeMap(2, frozenset({(0, 1)}), (0, 0), (1, 1))
    assert lake.task_id == "PO/_G"
    cells = [(row, column) for row in range(1, 5) for column in range(6)]
    held_out = [cell for cell in cells if LakeMap(6, frozenset({cell}), (0, 0), (5, 5)).is_held_out]
    assert held_out == [(2, 5)]


def test_impossible_maps_raise_an_explanation():
    with pytest.raises(RuntimeError, match=r"no solvable 2x2 map of split 'held_out' with p=1"):
        draw_map(np.random.default_rng(0), 2, 1.0, "corners", "held_out")


def test_different_maps_have_different_ids():
    a = LakeMap(3, frozenset({(1, 1)}), (0, 0), (2, 2))
    assert a.task_id != LakeMap(3, frozenset({(1, 2)}), (0, 0), (2, 2)).task_id
    assert a.task_id != LakeMap(3, frozenset({(1, 1)}), (2, 2), (0, 0)).task_id
