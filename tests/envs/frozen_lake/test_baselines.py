import numpy as np
import pytest

from offbeat.envs.frozen_lake import FrozenLakeConfig, FrozenLakeEnv
from offbeat.envs.frozen_lake.baselines import baselines, map_baselines, scripted_policy
from offbeat.envs.frozen_lake.maps import ACTIONS, LakeMap


@pytest.mark.parametrize("is_slippery", [False, True])
def test_optimal_beats_scripted_beats_random(is_slippery: bool):
    success = baselines(range(100), FrozenLakeConfig(is_slippery=is_slippery), max_steps=12)
    assert 0 < success.random < success.scripted < success.optimal <= 1


def test_baselines_of_single_maps_are_consistent():
    env = FrozenLakeEnv(FrozenLakeConfig(start_goal="random"))
    for seed in range(100):
        env.reset(seed=seed)
        success = map_baselines(env.lake, 12)
        assert success.optimal >= max(success.scripted, success.random) - 1e-12
        assert success.optimal in (0.0, 1.0)


def test_a_corridor_has_the_chances_worked_out_by_hand():
    lake = LakeMap(2, frozenset({(1, 0)}), (0, 0), (1, 1))
    # Right, then Down: 1/4 * 1/4; a bump first (2 of 4 directions here, 2 of 4 there) takes a third turn.
    assert map_baselines(lake, 2) == (1 / 16, 1.0, 1.0)
    assert map_baselines(lake, 3).random == pytest.approx(1 / 16 + 2 * (1 / 4 * 1 / 4 * 1 / 2))
    assert map_baselines(lake, 1) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("is_slippery", [False, True])
def test_the_scripted_probability_equals_simulation(is_slippery: bool):
    env = FrozenLakeEnv(FrozenLakeConfig(is_slippery=is_slippery))
    env.reset(seed=11)
    expected = map_baselines(env.lake, 12, is_slippery=is_slippery).scripted
    policy, rng, wins, plays = scripted_policy(env.lake), np.random.default_rng(0), 0, 1500
    lake = env.lake
    for _ in range(plays):
        env._agent = lake.start
        for _ in range(12):
            row, column = env.agent
            _, reward, terminated, _, _ = env.step(ACTIONS[rng.choice(4, p=policy[row * 4 + column])])
            if terminated:
                wins += reward > 0
                break
    assert wins / plays == pytest.approx(expected, abs=0.05)


def test_without_seeds_there_are_no_baselines():
    with pytest.raises(ValueError, match="no seeds"):
        baselines([])
