import warnings

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from offbeat.envs.frozen_lake import WORDS, FrozenLakeConfig, FrozenLakeEnv

SEEDS = range(30)


@pytest.mark.parametrize(
    "config",
    [
        FrozenLakeConfig(),
        FrozenLakeConfig(is_slippery=True, start_goal="random", size=6),
        FrozenLakeConfig(split="held_out", show_grid="always", render_mode="ansi"),
        FrozenLakeConfig(split="any", render_mode="rgb_array"),
    ],
)
def test_gymnasium_accepts_the_env(config: FrozenLakeConfig):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*spec.*|.*render mode.*")
        check_env(FrozenLakeEnv(config))


def test_the_first_turn_shows_the_grid_later_ones_the_neighbours():
    env = FrozenLakeEnv()
    first, _ = env.reset(seed=1)
    assert first == "P _ _ _\nO _ _ O\nO O _ _\n_ O _ G\n0 0 Left # Down O Right _ Up #"
    second, reward, terminated, truncated, _ = env.step("Right")
    assert second == "0 1 Left _ Down _ Right _ Up #"
    assert (reward, terminated, truncated) == (0.0, False, False)


def test_max_steps_truncates():
    env = FrozenLakeEnv(FrozenLakeConfig(max_steps=2))
    env.reset(seed=1)
    assert [env.step("?")[3] for _ in range(2)] == [False, True]
    env.reset(seed=1)
    assert env.step("?")[3] is False


def test_the_grid_may_be_shown_each_turn():
    env = FrozenLakeEnv(FrozenLakeConfig(show_grid="always"))
    env.reset(seed=1)
    assert env.step("Right")[0] == "_ P _ _\nO _ _ O\nO O _ _\n_ O _ G\n0 1 Left _ Down _ Right _ Up #"


def test_the_goal_pays_one_and_ends_the_episode():
    env = FrozenLakeEnv()
    env.reset(seed=1)
    *_, last = [env.step(answer) for answer in ("Right", "Right", "Down", "Down", "Right", "Down")]
    _, reward, terminated, _, info = last
    assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_a_hole_pays_nothing_and_ends_the_episode():
    env = FrozenLakeEnv()
    env.reset(seed=1)
    _, reward, terminated, _, info = env.step("Down")
    assert (reward, terminated, info["success"]) == (0.0, True, False)


@pytest.mark.parametrize("answer", ["", "Sideways", "Down Left", "<unk>"])
def test_an_invalid_answer_costs_the_penalty_without_a_move(answer: str):
    env = FrozenLakeEnv()
    env.reset(seed=1)
    before = env.agent
    _, reward, terminated, _, info = env.step(answer)
    assert (reward, terminated, env.agent) == (-0.1, False, before)
    assert info["action_is_valid"] is False
    assert info["format_penalty"] == -0.1


def test_walking_into_a_wall_is_valid_and_not_effective():
    env = FrozenLakeEnv()
    env.reset(seed=1)
    _, reward, _, _, info = env.step("left")
    assert (reward, info["action_is_valid"], info["action_is_effective"]) == (0.0, True, False)


def play(env: FrozenLakeEnv, seed: int) -> list[tuple[str, float]]:
    rng = np.random.default_rng(seed)
    turns = [(env.reset(seed=seed)[0], 0.0)]
    for _ in range(12):
        observation, reward, terminated, _, _ = env.step(str(rng.choice(["Left", "Down", "Right", "Up", "?"])))
        turns.append((observation, reward))
        if terminated:
            break
    return turns


def test_a_seed_gives_the_same_episode_on_any_instance():
    """Earlier episodes of the instance make no difference."""
    config = FrozenLakeConfig(is_slippery=True, start_goal="random")
    used = FrozenLakeEnv(config)
    for seed in SEEDS:
        assert play(used, seed) == play(FrozenLakeEnv(config), seed)


def test_nothing_is_drawn_from_the_global_generator():
    env = FrozenLakeEnv(FrozenLakeConfig(is_slippery=True))
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    for seed in SEEDS:
        play(env, seed)
    assert np.array_equal(np.random.get_state()[1], before)


def test_the_task_id_is_that_of_the_map_that_a_reset_draws():
    env = FrozenLakeEnv(FrozenLakeConfig(start_goal="random"))
    ids = [env.task_id(seed) for seed in SEEDS]
    for seed, task_id in zip(SEEDS, ids, strict=True):
        env.reset(seed=seed)
        assert env.lake.task_id == task_id
    assert len(set(ids)) > 20


def test_task_id_does_not_change_the_episode():
    env = FrozenLakeEnv()
    env.reset(seed=1)
    env.task_id(2)
    assert env.step("Right")[0] == "0 1 Left _ Down _ Right _ Up #"


def test_slips_go_to_either_side_a_third_each():
    env = FrozenLakeEnv(FrozenLakeConfig(is_slippery=True, p=1.0, size=5, split="any"))
    counts: dict[tuple[int, int], int] = {}
    for seed in range(600):
        env.reset(seed=seed)
        env._agent = (2, 2)
        env.step("Down")
        counts[env.agent] = counts.get(env.agent, 0) + 1
    assert set(counts) == {(3, 2), (2, 1), (2, 3)}
    assert all(150 < count < 250 for count in counts.values())


def test_every_word_of_an_episode_is_in_the_word_list():
    for config in (FrozenLakeConfig(), FrozenLakeConfig(size=10, start_goal="random")):
        env = FrozenLakeEnv(config)
        for seed in SEEDS:
            for observation, _ in play(env, seed):
                assert set(observation.split()) <= set(WORDS)
                assert observation in env.observation_space
    assert set(env.system_prompt.split()) <= set(WORDS)
    assert len(set(WORDS)) == len(WORDS)


def test_the_image_shows_agent_goal_and_holes():
    env = FrozenLakeEnv(FrozenLakeConfig(render_mode="rgb_array"))
    env.reset(seed=1)
    image = env.render()
    assert image.shape == (128, 128, 3)
    assert image.dtype == np.uint8
    centre = {(r, c): tuple(image[r * 32 + 16, c * 32 + 16]) for r in range(4) for c in range(4)}
    assert centre[0, 0] not in (centre[0, 1], centre[1, 0], centre[3, 3])
    assert len({centre[hole] for hole in env.lake.holes}) == 1
    env.step("Right")
    assert not np.array_equal(env.render(), image)


def test_stepping_before_a_reset_is_refused():
    with pytest.raises(RuntimeError, match="reset"):
        FrozenLakeEnv().step("Down")
