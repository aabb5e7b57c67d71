import numpy as np
import pytest

from offbeat.envs.sokoban import SokobanConfig, SokobanEnv
from offbeat.envs.sokoban.baselines import baselines, room_baselines, scripted_policy
from offbeat.envs.sokoban.demos import best_moves, clumsy_solving
from offbeat.envs.sokoban.rooms import ACTIONS, parse_room
from offbeat.envs.sokoban.solver import distances, solve

CORRIDOR = parse_room("# # # # # #\n# P X _ O #\n# # # # # #")


def sampled_success(room, policy, max_steps: int, episodes: int) -> float:
    rng, solved = np.random.default_rng(0), 0
    for _ in range(episodes):
        at = room
        for _ in range(max_steps):
            if at.is_solved:
                break
            at = at.push(int(rng.choice(4, p=policy(at))))
        solved += at.is_solved
    return solved / episodes


def test_the_probability_of_two_pushes_equals_a_hand_count():
    # In two turns both must be Right: 1/16. In three, one of the others may come first or between; Left after the first
    # push walks back. First wasted: 3/4 * 1/16. Between: Up or Down, 1/4 * 2/4 * 1/4.
    assert room_baselines(CORRIDOR, 2) == pytest.approx((1 / 16, 1.0, 1.0))
    assert room_baselines(CORRIDOR, 3).random == pytest.approx(1 / 16 + 3 / 64 + 1 / 32)
    assert room_baselines(CORRIDOR, 1) == (0.0, 0.0, 0.0)


def test_the_random_probability_equals_simulation():
    env = SokobanEnv(SokobanConfig(search_depth=5))
    env.reset(seed=4)
    exact = room_baselines(env.room, 12)
    assert exact.random == pytest.approx(sampled_success(env.room, lambda _: np.full(4, 0.25), 12, 1500), abs=0.05)
    assert exact.scripted == pytest.approx(sampled_success(env.room, scripted_policy, 12, 300), abs=0.1)


def test_the_optimum_is_one_if_the_shortest_solution_fits():
    env = SokobanEnv(SokobanConfig(num_boxes=2))
    for seed in range(6):
        env.reset(seed=seed)
        assert room_baselines(env.room, 9).optimal == float(len(solve(env.room)) <= 9)


def test_baselines_are_ordered_by_skill():
    success = baselines(range(12), SokobanConfig(split="held_out", search_depth=8), max_steps=12)
    assert 0 < success.random < success.scripted <= success.optimal <= 1
    with pytest.raises(ValueError, match="no seeds"):
        baselines([])


def demos(count: int, seed: int = 3) -> list[list[dict[str, str]]]:
    env, rng = SokobanEnv(SokobanConfig(search_depth=8)), np.random.default_rng(seed)
    return [
        clumsy_solving(env, rng, max_turns=8, agent_template="{step}/{actions_left}\n{observation}")
        for _ in range(count)
    ]


def test_demonstrations_are_conversations_whose_moves_change_the_room():
    for messages in demos(20):
        roles = [message["role"] for message in messages]
        assert roles == ["system", *["user", "assistant"] * ((len(roles) - 1) // 2)]
        shown = [message["content"].split("\n", 1)[1] for message in messages[1::2]]
        assert [message["content"].split("\n")[0] for message in messages[1:4:2]] == ["1/8", "2/7"][: len(shown)]
        for before, answer, now in zip(shown, messages[2::2], shown[1:], strict=False):
            assert parse_room(before).push(ACTIONS.index(answer["content"])) == parse_room(now)
            assert before != now


def test_demonstrations_are_weak_and_depend_on_the_generator_alone():
    assert demos(4) == demos(4)
    unsolved = sum(len(messages) == 17 for messages in demos(60))
    assert 15 < unsolved < 55


def test_distances_are_shortest_solution_lengths():
    """Unsolvable positions are left out."""
    env = SokobanEnv(SokobanConfig(search_depth=8, num_boxes=2))
    rng = np.random.default_rng(5)
    for seed in range(4):
        env.reset(seed=seed)
        left, room = distances(env.room), env.room
        for _ in range(6):
            solution = solve(room)
            assert left.get((room.player, room.boxes)) == (None if solution is None else len(solution))
            assert not solution or solution[0] in best_moves(room, left)
            room = room.push(int(rng.integers(4)))
