import numpy as np
import pytest

from offbeat.envs import registry
from offbeat.envs.sokoban import WORDS, SokobanConfig, SokobanEnv
from offbeat.envs.sokoban.rooms import ACTIONS, parse_room
from offbeat.envs.sokoban.solver import solve

ROOM = "# # # # # #\n# _ _ O _ #\n# P X _ _ #\n# _ _ _ # #\n# # # # # #"


def placed(config: SokobanConfig | None = None, room: str = ROOM) -> SokobanEnv:
    env = SokobanEnv(config)
    env.reset(seed=0)
    env._room = parse_room(room)
    return env


def test_solving_pays_step_box_and_finish_and_ends_the_episode():
    env = placed()
    steps = [env.step(answer) for answer in ("Right", "Down", "Right", "Up")]
    assert [round(reward, 6) for _, reward, *_ in steps] == [-0.1, -0.1, -0.1, 10.9]
    assert [terminated for _, _, terminated, _, _ in steps] == [False, False, False, True]
    assert steps[-1][4] == {
        "success": True,
        "action_is_valid": True,
        "action_is_effective": True,
        "format_penalty": 0.0,
    }


def test_pushing_a_box_off_its_target_costs_what_pushing_it_on_paid():
    two = "# # # # # #\n# P √ _ _ #\n# _ _ X O #\n# _ _ _ _ #\n# # # # # #"
    _, reward, terminated, _, _ = placed(room=two).step("right")
    assert (round(reward, 6), terminated) == (-1.1, False)


@pytest.mark.parametrize("answer", ["", "Jump", "Up Down"])
def test_an_invalid_answer_costs_step_and_penalty_without_a_move(answer: str):
    env = placed(SokobanConfig(format_penalty=-0.5))
    before = env.room
    _, reward, _, _, info = env.step(answer)
    assert (round(reward, 6), env.room, info["action_is_valid"], info["format_penalty"]) == (-0.6, before, False, -0.5)


def test_a_push_against_a_wall_is_valid_and_not_effective():
    _, reward, _, _, info = placed().step("Left")
    assert (reward, info["action_is_valid"], info["action_is_effective"]) == (-0.1, True, False)


def test_max_steps_truncates():
    env = placed(SokobanConfig(max_steps=2))
    assert [env.step("Left")[3] for _ in range(2)] == [False, True]
    env.reset(seed=1)
    assert env.step("?")[3] is False


def test_relative_text_shows_distances_to_boxes_and_targets():
    env = placed(SokobanConfig(observation_format="relative"))
    assert env.relative_text() == "Up _ Down _ Left # Right X X 0 Down 1 Right O 1 Up 1 Right"
    assert env.step("Up")[0] == "Up # Down _ Left # Right _ X 1 Down 1 Right O 1 Up 1 Right"
    assert set(env.relative_text().split()) <= set(WORDS)
    two = "# # # # # #\n# P O _ _ #\n# _ _ X O #\n# X _ _ _ #\n# # # # # #"
    shown = placed(SokobanConfig(observation_format="relative"), two).relative_text()
    assert shown.endswith(" X 1 Down 2 Right X 2 Down 0 Right O 1 Up 1 Left O 0 Down 1 Right")


def test_observations_show_rows_coordinates_or_both():
    places = "P 2 1 Up _ Down _ Left # Right X X 2 2 O 1 3"
    moved = "P 2 2 Up _ Down _ Left _ Right X X 2 3 O 1 3"
    assert placed()._observation() == ROOM
    assert placed(SokobanConfig(observation_format="coord"))._observation() == places
    both = placed(SokobanConfig(observation_format="grid_coord"))
    assert both._observation() == f"{ROOM}\n{places}"
    assert both.step("Right")[0].endswith(f"\n{moved}")
    once = placed(SokobanConfig(observation_format="grid_coord", show_grid="first"))
    assert once.step("Right")[0] == moved


def test_a_custom_vocabulary_is_shown_explained_and_parsed():
    signs = {0: "W", 1: ".", 2: "G", 3: "D", 4: "B", 5: "A", 6: "C"}
    words = {1: "North", 2: "South", 3: "West", 4: "East"}
    env = placed(SokobanConfig(grid_lookup=signs, action_lookup=words, grid_vocab={"W": "wall", "B": "box"}))
    assert env._observation() == ROOM.translate(str.maketrans("#_OXP", "W.GBA"))
    assert env.system_prompt == "Push B to G . The room: W wall, B box. Answer with one of North, South, West, East."
    assert env.step("east")[4]["action_is_effective"]
    assert not env.step("Right")[4]["action_is_valid"]
    assert env.step("South")[0] in env.observation_space


def test_settings_of_roll_yaml_are_accepted():
    settings = {
        "dim_room": [6, 6],
        "num_boxes": 1,
        "search_depth": 10,
        "max_steps": 10,
        "action_pattern": "<answer>(.*?)</answer>",
        "grid_lookup": {"0": "W", "1": ".", "2": "G", "3": "C", "4": "B", "5": "A", "6": "@"},
        "action_lookup": {"1": "Up", "2": "Down", "3": "Left", "4": "Right"},
    }
    env = registry.make("sokoban", settings)
    env.reset(seed=3)
    assert env.step("<answer>Up</answer>")[4]["action_is_valid"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim_room": [3, 6]}, "env_config.dim_room: rows and columns must be from 4 to 32"),
        ({"dim_room": [4, 4], "num_boxes": 2}, "need more than 4 cells"),
        ({"grid_lookup": {"0": "W"}}, "env_config.grid_lookup: needs a text for each of 0, 1, 2, 3, 4, 5, 6"),
        ({"action_lookup": {"1": "a", "2": "A", "3": "c", "4": "d"}}, "must differ"),
        ({"grid_vocab": {"Q": "queen"}}, "explains Q"),
        ({"show_grid": "first"}, "set observation_format: grid_coord"),
        ({"num_box": 1}, "did you mean env_config.num_boxes?"),
    ],
)
def test_invalid_settings_are_refused_with_a_correction(settings: dict[str, object], message: str):
    assert message in "; ".join(registry.check_env_config("sokoban", settings))


def test_the_task_id_is_that_of_the_room_that_a_reset_makes():
    env = SokobanEnv(SokobanConfig(search_depth=6))
    for seed in range(10):
        env.reset(seed=seed)
        assert env.room.task_id == env.task_id(seed)


def test_every_word_of_an_episode_is_in_the_word_list():
    for config in (SokobanConfig(observation_format="grid_coord"), SokobanConfig(dim_room=(7, 12), num_boxes=2)):
        env = SokobanEnv(config)
        for seed in range(5):
            texts = [env.reset(seed=seed)[0], *(env.step(answer)[0] for answer in ACTIONS)]
            assert set(" ".join(texts).split()) <= set(WORDS)
    assert set(env.system_prompt.split()) <= set(WORDS)


def test_the_image_distinguishes_every_kind_of_cell():
    env = placed(SokobanConfig(render_mode="rgb_array"))
    tiles = {
        cell: env.render()[r * 32 : r * 32 + 32, c * 32 : c * 32 + 32]
        for cell in range(30)
        for r, c in [divmod(cell, 6)]
    }
    kinds = {env.room.code(cell): tile.tobytes() for cell, tile in tiles.items()}
    assert len(set(kinds.values())) == len(kinds) == 5
    assert env.render().shape == (160, 192, 3)
    solved = placed(SokobanConfig(render_mode="rgb_array"))
    for action in solve(solved.room):
        solved.step(ACTIONS[action])
    assert not np.array_equal(solved.render(), env.render())
