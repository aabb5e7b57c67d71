"""`gdpo` from groups to advantages, against a loop in float64 over one reward and one group at a time."""

import math
import statistics
from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.services.messages.types import Group, StopReason
from offbeat.services.reward.kinds.config import RegexConfig
from offbeat.trainer.algorithms.gdpo import batch_normalized, decoupled_sum
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.rewards import RewardNormalization, RewardShaping
from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.data.batch import pack
from offbeat.trainer.data.reward_shaping import shape_rewards
from offbeat.trainer.data.selection import carries_signal, masked_counts
from offbeat.trainer.losses.targets import Targets, build_targets
from tests.copying import replace
from tests.trainer.trajectories import group, trajectory

WEIGHTS = {"answer": 1.0, "format": 0.25, "style": -2.0}
REWARDS = tuple(RegexConfig(name=name, kind="regex", pattern="a", weight=weight) for name, weight in WEIGHTS.items())
SIZE, EPS = 3, 1e-6

Column = Sequence[Mapping[str, float]]
"""Rewards by name of each member of a group."""


def config_of(**settings: object) -> LearnerRunConfig:
    tree = {"pipeline": "rlvr", "rewards": REWARDS, "adv_estimator": "gdpo", "rollout_batch_size": 8, **settings}
    return LearnerRunConfig.model_validate(tree)


def scored(number: int, members: Column, env: Sequence[float] = ()) -> Group:
    """A group as an env worker scores it; tag `tagN`. env: rewards of the env itself."""
    made = []
    for i, values in enumerate(members):
        total = sum(WEIGHTS[name] * value for name, value in values.items()) + (env[i] if env else 0.0)
        one = trajectory(i, [(2, 1 + i % 2, 0.0), (1, 2, total)], base=400 * number + 20 * i, tag=f"tag{number % 2}")
        made.append(
            replace(one, metrics={f"reward/{name}": value for name, value in values.items()} | {"success": 1.0})
        )
    return group(number, *made, tag=f"tag{number % 2}")


def by_hand(groups: Sequence[Column], *, scale: bool = True, num_masked: int = 0) -> list[float]:
    sums = []
    for members in groups:
        totals = [0.0] * len(members)
        for name, weight in WEIGHTS.items():
            values = [member[name] for member in members if name in member]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            for i, member in enumerate(members):
                if name in member and spread > EPS:
                    totals[i] += weight * (member[name] - statistics.fmean(values)) / (spread + EPS if scale else 1.0)
        sums += totals
    everyone = [*sums, *[0.0] * num_masked]
    deviation = statistics.stdev(everyone) if len(everyone) > 1 else 0.0
    return [value / (deviation + EPS) if deviation > EPS else 0.0 for value in sums]


def advantages_of(targets: Targets, groups: Sequence[Group]) -> list[float]:
    """Advantage of each episode, which all of its tokens have."""
    owner = pack(groups).trajectory
    rows = [targets.advantages[owner == i] for i in range(int(owner.max()) + 1)]
    assert all(bool((row == row[0]).all()) for row in rows)
    return [float(row[0]) for row in rows]


def contributions(targets: Targets, groups: Sequence[Group]) -> dict[int, float]:
    """Weight times advantage by token id."""
    batch = pack(groups)
    ids = batch.tokens[batch.positions].tolist()
    return dict(zip(ids, (targets.weights * targets.advantages).tolist(), strict=True))


VARIED: tuple[Column, ...] = (
    [
        {"answer": 1.0, "format": 0.0, "style": 0.3},
        {"answer": 0.0, "format": 0.0, "style": -8.0},
        {"answer": 0.0, "format": 1.0, "style": 2.0},
    ],
    [{"answer": 1.0, "format": 0.5, "style": 40.0}],  # alone
    [{"answer": 1.0, "style": 1.5}, {"answer": 1.0, "style": 1.25}],  # of a tag that `format` does not score
    [{"answer": 1.0, "format": 1.0, "style": 0.1}] * 3,  # equal
)


@pytest.mark.parametrize("method", ["mean_std", "mean"])
def test_advantages_equal_the_definition(method: str):
    config = config_of(
        zero_variance="train", reward_normalization=RewardNormalization.model_validate({"method": method})
    )
    groups = [scored(n, members) for n, members in enumerate(VARIED)]
    got = advantages_of(build_targets(pack(groups), config), groups)
    assert got == pytest.approx(by_hand(VARIED, scale=method == "mean_std"), abs=1e-5)
    assert got[3] == 0
    assert got[6:] == [0.0, 0.0, 0.0]


values = st.sampled_from([math.nan, 0.0, 0.1, 1.0, -30.0])


@given(st.lists(st.tuples(st.integers(0, 2), values, values), min_size=1, max_size=9))
def test_sums_equal_a_loop_over_rewards_and_groups(rows: list[tuple[int, float, float]]):
    parts, numbers = torch.tensor([row[1:] for row in rows], dtype=torch.float64), [row[0] for row in rows]
    expected = [0.0] * len(rows)
    for k, weight in enumerate((1.0, 0.1)):
        for number in set(numbers):
            peers = [i for i, row in enumerate(rows) if row[0] == number and not math.isnan(row[1 + k])]
            spread = statistics.stdev([rows[i][1 + k] for i in peers]) if len(peers) > 1 else 0.0
            mean = statistics.fmean([rows[i][1 + k] for i in peers]) if peers else 0.0
            for i in peers if spread > EPS else ():
                expected[i] += weight * (rows[i][1 + k] - mean) / (spread + EPS)
    got = decoupled_sum(parts, torch.tensor([1.0, 0.1]), torch.tensor(numbers))
    assert got.tolist() == pytest.approx(expected, abs=1e-7)
    spread = statistics.stdev(expected) if len(expected) > 1 else 0.0
    normalized = [value / (spread + EPS) for value in expected] if spread > EPS else [0.0] * len(expected)
    assert batch_normalized(got).tolist() == pytest.approx(normalized, abs=1e-6)


def test_a_rare_reward_counts_as_much_as_a_large_one():
    """Sums of (1, 0) and (0, 100) differ by 99; each reward on its own has one member that is better."""
    groups = [
        scored(0, [{"answer": 1.0, "format": 0.0}, {"answer": 0.0, "format": 400.0}, {"answer": 0.0, "format": 0.0}])
    ]
    first, second, third = advantages_of(build_targets(pack(groups), config_of()), groups)
    assert first > 0 > third
    grpo = advantages_of(build_targets(pack(groups), config_of(adv_estimator="grpo")), groups)
    assert grpo[0] < 0 < grpo[1]
    assert second < grpo[1]


def test_the_envs_own_reward_and_shaping_are_one_more_reward():
    config = config_of(reward_shaping=RewardShaping(response_length_penalty_coef=0.5))
    members = [{"answer": 1.0}, {"answer": 0.0}, {"answer": 1.0}]
    env = (0.0, 2.0, 1.0)
    groups = shape_rewards([scored(0, members, env)], config)
    rest = [extra - 0.5 * t.num_sampled for extra, t in zip(env, groups[0].trajectories, strict=True)]
    sums = [
        sum((row[i] - statistics.fmean(row)) / (statistics.stdev(row) + EPS) for row in ([1.0, 0.0, 1.0], rest))
        for i in range(SIZE)
    ]
    expected = [value / (statistics.stdev(sums) + EPS) for value in sums]
    assert advantages_of(build_targets(pack(groups), config), groups) == pytest.approx(expected, abs=1e-5)


def test_rounding_of_large_rewards_is_no_reward():
    """0.1 x 3 is not 0.3: what is left of the total is compared only if it is more than rounding."""
    members = [{"answer": 0.1 * k, "format": 1e4 / 3 * k, "style": 0.7 * k} for k in range(1, 4)]
    groups = [scored(0, members)]
    got = advantages_of(build_targets(pack(groups), config_of()), groups)
    assert got == pytest.approx(by_hand([members]), abs=1e-5)


def test_masked_groups_and_masked_episodes_are_as_if_computed():
    """`zero_variance: mask` gives the weights times advantages of `train`; an episode out of the loss still counts."""
    groups = [scored(n, members) for n, members in enumerate(VARIED)]
    for n in (0, 3):
        first, *others = groups[n].trajectories
        groups[n] = replace(groups[n], trajectories=(replace(first, stop_reason=StopReason.MAX_LENGTH), *others))
    everyone = config_of(zero_variance="train", max_len_mask=True)
    whole = build_targets(pack(groups), everyone)
    masking = config_of(zero_variance="mask", max_len_mask=True)
    kept = [each for each in groups if carries_signal(each, masking)]
    assert [each.number for each in kept] == [0, 2]
    masked = masked_counts([each for each in groups if each not in kept], masking)
    part = build_targets(pack(kept), masking, masked=masked)
    assert advantages_of(part, kept) == pytest.approx(by_hand([VARIED[0], VARIED[2]], num_masked=4), abs=1e-5)
    computed, shown = contributions(whole, groups), contributions(part, kept)
    assert shown == pytest.approx({token: computed[token] for token in shown}, abs=1e-6)
    assert bool((part.weights[pack(kept).trajectory == 0] == 0).all())


def test_a_group_whose_rewards_differ_but_add_up_equally_has_a_signal():
    members = [{"answer": 0.25, "format": 0.0}, {"answer": 0.0, "format": 1.0}, {"answer": 0.125, "format": 0.5}]
    equal = scored(0, members)
    assert carries_signal(equal, config_of())
    assert not carries_signal(equal, config_of(adv_estimator="grpo"))


def test_without_rewards_of_its_own_it_is_grpo_divided_by_the_batchs_deviation():
    groups = [scored(n, members) for n, members in enumerate(VARIED)]
    bare = [replace(g, trajectories=tuple(replace(t, metrics={}) for t in g.trajectories)) for g in groups]
    of_grpo = build_targets(pack(bare), AlgorithmConfig(zero_variance="train"))
    of_gdpo = build_targets(pack(bare), AlgorithmConfig(zero_variance="train", adv_estimator="gdpo"))
    spread = statistics.stdev(advantages_of(of_grpo, bare))
    torch.testing.assert_close(of_gdpo.advantages, of_grpo.advantages / spread, rtol=1e-4, atol=1e-5)
