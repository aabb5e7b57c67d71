"""From groups to advantages, against a slow reference that handles one trajectory at a time."""

import statistics
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.services.messages.types import Group, Trajectory
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.rewards import RewardNormalization
from offbeat.trainer.data.batch import Batch, pack
from offbeat.trainer.data.selection import carries_signal
from offbeat.trainer.losses.targets import Targets, build_targets
from tests.trainer.trajectories import (
    cut_into_segments,
    group,
    trajectory,
    two_groups,
)

MEAN = RewardNormalization(method="mean")
IDENTITY = RewardNormalization(method="identity")

reward = st.sampled_from([-0.5, 0.0, 0.25, 1.0])
steps = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), reward), min_size=1, max_size=3)
shapes_of = st.lists(st.tuples(st.integers(0, 2), steps), min_size=1, max_size=7)


def made(shapes: Sequence[tuple[int, list[tuple[int, int, float]]]]) -> list[Group]:
    """Groups 0 to 2, of one tag for even and one for odd numbers, with trajectories of the given shapes."""
    members: dict[int, list[Trajectory]] = {}
    for i, (number, shape) in enumerate(shapes):
        members.setdefault(number, []).append(trajectory(i, shape, base=100 * i, tag=f"tag{number % 2}"))
    return [group(number, *members[number], tag=f"tag{number % 2}") for number in sorted(members)]


def slow_advantages(groups: list[Group], config: AlgorithmConfig, ref_shift: float, kl_coef: float) -> dict[int, float]:
    """Token id -> advantage, before whitening and clipping; the reference's logprobs are the engine's plus `ref_shift`, the
    critic says 0.1 times the token's id modulo 7."""
    out: dict[int, float] = {}
    norm = config.reward_normalization
    key = {"traj_group_id": lambda g: g.number, "batch": lambda _: 0, "tags": lambda g: g.tag}[norm.grouping]
    everyone = [(g, t) for g in groups for t in g.trajectories]
    for g, t in everyone:
        peers = [p.reward for h, p in everyone if key(h) == key(g)]
        (segment,) = t.segments
        ids = [int(token) for token, mask in zip(segment.tokens, segment.loss_mask, strict=True) if mask]
        rewards = dict.fromkeys(ids, 0.0)
        if config.reward_method == "identity":
            for turn in t.turns:
                rewards[int(segment.tokens[turn.end - 1])] += turn.reward
        else:
            score = t.reward - statistics.fmean(peers) if len(peers) > 1 else 0.0
            if config.reward_method == "mean_std":
                deviation = statistics.stdev(peers) if len(peers) > 1 else 0.0
                score = score / (deviation + 1e-6) if deviation > 1e-6 else 0.0
            rewards[ids[-1]] = score
        clip = config.reward_clip if config.reward_clip is not None else float("inf")
        rewards = {i: min(max(r, -clip), clip) - kl_coef * -ref_shift for i, r in rewards.items()}
        values = {i: 0.1 * (i % 7) if config.adv_estimator == "gae" else 0.0 for i in ids}
        lambd = config.lambd if config.adv_estimator == "gae" else 1.0
        following, value_after = 0.0, 0.0
        for i in reversed(ids):
            following = rewards[i] + config.gamma * value_after - values[i] + config.gamma * lambd * following
            out[i], value_after = following, values[i]
    return out


def critic_of(batch: Batch) -> torch.Tensor:
    return 0.1 * (batch.tokens[batch.positions] % 7).float()


def by_token(batch: Batch, targets: Targets) -> dict[int, float]:
    return dict(zip(batch.tokens[batch.positions].tolist(), targets.advantages.tolist(), strict=True))


def prepared(groups: list[Group], config: AlgorithmConfig, ref_shift: float = 0.0) -> dict[int, float]:
    batch = pack(groups)
    values = critic_of(batch) if config.adv_estimator == "gae" else None
    ref = batch.behavior_logprobs + ref_shift if config.needs_reference else None
    return by_token(batch, build_targets(batch, config, kl_coef=0.5, ref_logprobs=ref, values=values))


@given(
    shapes_of,
    st.sampled_from(["gae", "grpo", "reinforce"]),
    st.sampled_from(["traj_group_id", "batch", "tags"]),
    st.sampled_from([None, "mean", "mean_std"]),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from([None, 0.3]),
    st.booleans(),
)
def test_advantages_equal_reference_implementation(shapes, estimator, grouping, method, gamma, clip, penalised):
    compares = method is not None or estimator == "grpo"
    config = AlgorithmConfig(
        adv_estimator=estimator,
        reward_normalization=RewardNormalization(grouping=grouping if compares else "traj_group_id", method=method),
        gamma=gamma,
        reward_clip=clip,
        **({"lambd": 0.8} if estimator == "gae" else {}),
        **({"add_token_level_kl": True, "init_kl_coef": 0.5} if penalised else {}),
    )
    groups = made(shapes)
    expected = slow_advantages(groups, config, 0.3 if penalised else 0.0, 0.5)
    assert prepared(groups, config, 0.3) == pytest.approx(expected, rel=1e-3, abs=1e-4)


@given(shapes_of, st.sampled_from(["gae", "grpo", "reinforce"]), st.randoms(use_true_random=False))
def test_advantages_do_not_depend_on_order(shapes, estimator, random):
    config = AlgorithmConfig(adv_estimator=estimator, whiten_advantages=True, gamma=0.9)
    shuffled = [group(g.number, *random.sample(g.trajectories, len(g.trajectories)), tag=g.tag) for g in made(shapes)]
    random.shuffle(shuffled)
    assert prepared(shuffled, config) == pytest.approx(prepared(made(shapes), config), rel=1e-3, abs=1e-4)


@given(shapes_of, st.sampled_from(["gae", "grpo", "reinforce"]))
def test_segments_do_not_change_advantages(shapes, estimator):
    config = AlgorithmConfig(adv_estimator=estimator, gamma=0.9)
    whole = made(shapes)
    cut = [group(g.number, *(cut_into_segments(t) for t in g.trajectories), tag=g.tag) for g in whole]
    assert prepared(cut, config) == pytest.approx(prepared(whole, config), abs=1e-6)


def test_token_advantage_is_reward_minus_group_mean():
    targets = build_targets(pack(two_groups()), AlgorithmConfig(reward_normalization=MEAN))
    expected = [0.5] * 3 + [-0.5] * 2 + [-0.3] + [0.3] * 4
    torch.testing.assert_close(targets.advantages, torch.tensor(expected))


def test_grpo_divides_by_group_deviation_by_default():
    targets = build_targets(pack(two_groups()), AlgorithmConfig())
    expected = [2**-0.5] * 3 + [-(2**-0.5)] * 2 + [-(2**-0.5)] + [2**-0.5] * 4
    torch.testing.assert_close(targets.advantages, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_gae_bootstraps_from_next_turns_first_token():
    batch = pack([group(0, trajectory(0, [(2, 1, 0.0), (5, 1, 1.0)]))])
    config = AlgorithmConfig(adv_estimator="gae", gamma=0.5, lambd=0.0)
    targets = build_targets(batch, config, values=torch.tensor([0.25, 0.75]))
    assert targets.advantages.tolist() == [0.5 * 0.75 - 0.25, 1.0 - 0.75]
    assert targets.returns is not None
    assert targets.returns.tolist() == [0.5 * 0.75, 1.0]


def test_gae_requires_values():
    with pytest.raises(ValueError, match="critic's values"):
        build_targets(pack(two_groups()), AlgorithmConfig(adv_estimator="gae"))


def test_whitening_precedes_clip_and_keeps_returns():
    batch = pack(two_groups())
    config = AlgorithmConfig(adv_estimator="gae", whiten_advantages=True, advantage_clip=0.5)
    plain = build_targets(batch, AlgorithmConfig(adv_estimator="gae"), values=critic_of(batch))
    targets = build_targets(batch, config, values=critic_of(batch))
    white = (plain.advantages - plain.advantages.mean()) / plain.advantages.std()
    torch.testing.assert_close(targets.advantages, white.clamp(-0.5, 0.5), rtol=1e-4, atol=1e-4)
    assert (white.abs() > 0.5).any()
    assert targets.returns is not None
    assert plain.returns is not None
    assert torch.equal(targets.returns, plain.returns)


@given(shapes_of, st.sampled_from(["gae", "grpo", "reinforce"]))
def test_whitening_over_tags_is_whitening_of_each_tags_groups_alone(shapes, estimator):
    """ROLL computes advantages by domain."""
    config = AlgorithmConfig(adv_estimator=estimator, whiten_advantages=True, whiten_over="tags")
    groups = made(shapes)
    alone = AlgorithmConfig(adv_estimator=estimator, whiten_advantages=True)
    expected: dict[int, float] = {}
    for tag in {each.tag for each in groups}:
        expected |= prepared([each for each in groups if each.tag == tag], alone)
    assert prepared(groups, config) == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_rewards_are_divided_by_the_deviation_of_their_tag():
    groups = [
        group(number, *(trajectory(2 * number + i, [(1, 1, size * (i + 1))], base=10 * (2 * number + i), tag=f"tag{number}")
                        for i in range(2)), tag=f"tag{number}")
        for number, size in enumerate((1.0, 100.0))
    ]  # fmt: skip
    config = AlgorithmConfig(adv_estimator="reinforce", whiten_rewards=True, whiten_over="tags")
    scaled = [value * 2**0.5 for value in (1.0, 2.0, 1.0, 2.0)]
    assert [*prepared(groups, config).values()] == pytest.approx(scaled, rel=1e-4)


@pytest.mark.parametrize("over", ["batch", "tags"])
def test_equal_rewards_are_divided_by_nothing(over: str):
    """Answers of one token that are all right: the deviation of their rewards is 0."""
    answers = [
        group(number, *(trajectory(2 * number + i, [(1, 1, reward)], base=10 * (2 * number + i), tag=f"tag{number}")
                        for i, reward in enumerate(rewards)), tag=f"tag{number}")
        for number, rewards in enumerate(((0.7, 0.7), (0.7, 0.7) if over == "batch" else (1.0, 3.0)))
    ]  # fmt: skip
    config = AlgorithmConfig.model_validate({"adv_estimator": "reinforce", "whiten_rewards": True, "whiten_over": over})
    scaled = [0.7, 0.7, 0.7, 0.7] if over == "batch" else [0.7, 0.7, 0.5**0.5, 3 * 0.5**0.5]
    assert [*prepared(answers, config).values()] == pytest.approx(scaled, rel=1e-4)


@pytest.mark.parametrize("kind", ["kl", "k2", "k3", "abs"])
def test_kl_penalty_is_subtracted_per_token(kind: str):
    batch = pack([group(0, trajectory(0, [(1, 2, 0.0)]))])
    config = AlgorithmConfig(adv_estimator="reinforce", gamma=0.0, add_token_level_kl=True, kl_penalty=kind)
    targets = build_targets(batch, config, kl_coef=0.5, ref_logprobs=batch.behavior_logprobs - 2.0)
    expected = {"kl": 2.0, "k2": 2.0, "k3": 2.718281828**-2 + 1, "abs": 2.0}[kind]
    torch.testing.assert_close(targets.advantages, torch.full((2,), -0.5 * expected))
    assert targets.kl_in_reward == pytest.approx(expected)


def test_reported_kl_is_mean_over_trajectories_of_token_means():
    batch = pack([group(0, trajectory(0, [(1, 1, 0.0)]), trajectory(1, [(1, 3, 0.0)], base=9))])
    config = AlgorithmConfig(adv_estimator="reinforce", add_token_level_kl=True, init_kl_coef=0.1)
    shift = torch.tensor([4.0, 1.0, 2.0, 3.0])
    targets = build_targets(batch, config, kl_coef=0.1, ref_logprobs=batch.behavior_logprobs - shift)
    assert targets.kl_in_reward == pytest.approx((4.0 + 2.0) / 2)


def test_group_without_variance_has_no_signal_when_siblings_are_compared():
    equal = group(0, trajectory(0, [(1, 1, 1.0)]), trajectory(1, [(1, 2, 0.5), (1, 1, 0.5)]))
    assert not carries_signal(equal, AlgorithmConfig())
    assert not carries_signal(equal, AlgorithmConfig(zero_variance="refill"))
    assert not carries_signal(equal, AlgorithmConfig(adv_estimator="reinforce", reward_normalization=MEAN))
    assert carries_signal(equal, AlgorithmConfig(zero_variance="train"))
    assert carries_signal(equal, AlgorithmConfig(adv_estimator="gae"))
    over_batch = RewardNormalization(grouping="batch")
    assert carries_signal(equal, AlgorithmConfig(reward_normalization=over_batch))
    assert all(carries_signal(each, AlgorithmConfig()) for each in two_groups())


@given(shapes_of)
def test_groups_without_signal_have_zero_advantages(shapes):
    config = AlgorithmConfig(reward_normalization=MEAN)
    for each in made(shapes):
        silent = all(abs(a) < 1e-6 for a in prepared([each], config).values())
        assert carries_signal(each, config) == (not silent)
