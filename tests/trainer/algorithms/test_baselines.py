"""Group baselines, moments and turn-wise estimators against loops over one trajectory or turn at a time."""

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.trainer.algorithms.gigpo import group_in_group
from offbeat.trainer.algorithms.gpg import informative_share_inverse
from offbeat.trainer.algorithms.maxrl import mean_normalized
from offbeat.trainer.algorithms.normalization import (
    RunningMoments,
    constant_groups,
    group_moments,
    normalize,
    normalize_by_group,
)
from offbeat.trainer.algorithms.opo import length_weighted_baseline
from offbeat.trainer.algorithms.remax import subtract_greedy_reward
from offbeat.trainer.algorithms.rloo import leave_one_out
from offbeat.trainer.algorithms.shaping import overlong_penalty

rows_of = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.integers(0, 5)), min_size=1, max_size=14
)


@settings(max_examples=40)
@given(rows_of)
def test_baselines_equal_their_definitions(rows: list[tuple[int, float, int]]):
    group = torch.tensor([g for g, _, _ in rows])
    rewards = torch.tensor([r for _, r, _ in rows], dtype=torch.float64)
    lengths = torch.tensor([n for _, _, n in rows], dtype=torch.float64)
    alone, weighted, likely = (
        leave_one_out(rewards, group),
        length_weighted_baseline(rewards, lengths, group),
        mean_normalized(rewards, group),
    )
    informative = 0
    for i, (g, r, _) in enumerate(rows):
        members = [(s, n) for h, s, n in rows if h == g]
        siblings = [s for j, (h, s, _) in enumerate(rows) if h == g and j != i]
        mean = statistics.fmean(s for s, _ in members)
        tokens = sum(n for _, n in members)
        baseline = sum(s * n for s, n in members) / tokens if tokens else 0.0
        informative += len({s for s, _ in members}) > 1
        assert float(alone[i]) == pytest.approx(r - statistics.fmean(siblings) if siblings else 0.0, abs=1e-9)
        assert float(weighted[i]) == pytest.approx(r - baseline, abs=1e-9)
        assert float(likely[i]) == pytest.approx((r - mean) / (mean + 1e-6) if mean > 1e-6 else 0.0, abs=1e-9)
    expected = len(rows) / informative if informative else 1.0
    assert informative_share_inverse(~constant_groups(rewards, group)) == pytest.approx(expected)


@given(rows_of, st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=4, max_size=4))
def test_remax_subtracts_greedy_reward(rows: list[tuple[int, float, int]], greedy: list[float]):
    group, rewards = torch.tensor([g for g, _, _ in rows]), torch.tensor([r for _, r, _ in rows], dtype=torch.float64)
    got = subtract_greedy_reward(rewards, torch.tensor(greedy, dtype=torch.float64), group)
    assert got.tolist() == pytest.approx([r - greedy[g] for g, r, _ in rows], abs=1e-12)


def test_remax_gradient_is_unbiased():
    """Over all actions of a softmax policy: sum_a p(a) (R(a) - b) d log p(a) = sum_a p(a) R(a) d log p(a), b = R(greedy)."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, 0.0, 0.25, 2.0], dtype=torch.float64)
    logp = logits.log_softmax(0)
    greedy = rewards[logp.argmax()][None]
    advantages = subtract_greedy_reward(rewards, greedy, torch.zeros(4, dtype=torch.int64))
    assert float(greedy) == 0.25
    result, expected = (
        torch.autograd.grad((logp.exp().detach() * a * logp).sum(), logits, retain_graph=True)[0]
        for a in (advantages, rewards)
    )
    torch.testing.assert_close(result, expected)


def test_maxrl_gradient_is_mean_success_score_minus_mean_score():
    """Binary rewards: (1/N) sum A_i s_i = mean of the successes' scores - mean of all scores (eq. 10 of the paper)."""
    rewards, scores = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0], dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    got = (mean_normalized(rewards, torch.zeros(8, dtype=torch.int64), eps=0.0) * scores).mean()
    torch.testing.assert_close(got, scores[rewards == 1].mean() - scores.mean())


@pytest.mark.parametrize("reward", [0.1, 0.7, 10.9, -3.3])
@pytest.mark.parametrize("size", [1, 3, 7, 8, 16])
def test_equal_rewards_have_no_advantage(reward: float, size: int):
    """float32: the mean of eight 10.9 is 10.900001, which scaled by a deviation of the same size was an advantage of .47."""
    rewards, group = torch.full((size,), reward), torch.zeros(size, dtype=torch.int64)
    lengths = torch.arange(1, size + 1).float()
    for advantages in (
        leave_one_out(rewards, group),
        length_weighted_baseline(rewards, lengths, group),
        mean_normalized(rewards, group),
        normalize_by_group(rewards, group, scale=True),
        normalize_by_group(rewards, group),
    ):
        assert advantages.tolist() == [0.0] * size
        assert advantages.dtype == rewards.dtype


def test_equal_successes_at_one_state_have_no_step_advantage():
    turns = 8
    ones = torch.ones(turns, dtype=torch.bool)
    index = torch.arange(turns)
    got = group_in_group(
        torch.full((turns,), 10.9),
        torch.zeros(turns, dtype=torch.int64),
        torch.full((turns,), 10.9),
        index,
        ones,
        torch.zeros(turns, dtype=torch.int64),
        gamma=0.95,
        episode_weight=1.0,
        step_weight=1.0,
        scale=True,
    )
    assert got.tolist() == [0.0] * turns


@given(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=8))
def test_maxrl_of_signed_rewards_stays_in_range_of_nonnegative_ones(rewards: list[float]):
    got = mean_normalized(torch.tensor([*rewards, 2.0, -1.99]), torch.zeros(len(rewards) + 2, dtype=torch.int64))
    assert float(got.min()) >= -1
    assert float(got.max()) <= len(rewards) + 1


@pytest.mark.parametrize("baseline", [leave_one_out, mean_normalized])
def test_baselines_accept_no_trajectories(baseline):
    assert baseline(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert length_weighted_baseline(*(torch.zeros(0),) * 2, torch.zeros(0, dtype=torch.int64)).shape == (0,)
    assert informative_share_inverse(torch.zeros(0, dtype=torch.bool)) == 1.0


def test_mean_and_deviation_can_use_different_groupings():
    rewards, group = torch.tensor([1.0, 0.0, 4.0, 6.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    everyone = torch.zeros_like(group)
    got = normalize(rewards, group_moments(rewards, group), group_moments(rewards, everyone))
    deviation = statistics.stdev([1.0, 0.0, 4.0, 6.0]) + 1e-6
    assert got.tolist() == pytest.approx([0.5 / deviation, -0.5 / deviation, -1 / deviation, 1 / deviation])
    only_scaled = normalize(rewards, None, group_moments(rewards, everyone))
    assert only_scaled.tolist() == pytest.approx([r / deviation for r in (1.0, 0.0, 4.0, 6.0)])


@settings(max_examples=30)
@given(st.lists(st.lists(st.floats(-5, 5), max_size=5), min_size=1, max_size=5))
def test_running_moments_cover_all_rewards_and_survive_checkpoint(batches: list[list[float]]):
    running = RunningMoments()
    for batch in batches:
        running.update("a", torch.tensor(batch, dtype=torch.float64))
        restored = RunningMoments()
        restored.load_state_dict(running.state_dict())
        running = restored
    everything = [r for batch in batches for r in batch]
    running.update("b", torch.tensor([100.0]))
    mean, std, size = running.moments(["a", "b", "c"])
    assert size.tolist() == [len(everything), 1, 0]
    assert float(mean[0]) == pytest.approx(statistics.fmean(everything) if everything else 0.0, abs=1e-9)
    assert float(std[0]) == pytest.approx(statistics.stdev(everything) if len(everything) > 1 else 0.0, abs=1e-7)


turns_of = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 1.0, -0.5])), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40)
@given(turns_of, st.booleans())
def test_gigpo_normalizes_episodes_by_group_and_returns_by_state(episodes, scale: bool):
    """episodes: (group, turns of (state, reward))."""

    def compared(value: float, peers: list[float]) -> float:
        if len(peers) < 2:
            return 0.0
        deviation = statistics.stdev(peers)
        centered = value - statistics.fmean(peers)
        return centered if not scale else (centered / (deviation + 1e-6) if deviation > 1e-6 else 0.0)

    totals = [sum(r for _, r in turns) for _, turns in episodes]
    returns = [[sum(0.9 ** (k - t) * turns[k][1] for k in range(t, len(turns))) for t in range(len(turns))]
               for _, turns in episodes]  # fmt: skip
    expected = []
    for e, (g, turns) in enumerate(episodes):
        for t, (state, _) in enumerate(turns):
            peers = [
                returns[f][u]
                for f, (h, others) in enumerate(episodes)
                for u, (other, _) in enumerate(others)
                if (h, other) == (g, state)
            ]
            of_episode = compared(totals[e], [totals[f] for f, (h, _) in enumerate(episodes) if h == g])
            expected.append(0.5 * of_episode + 2.0 * compared(returns[e][t], peers))
    owner = [e for e, (_, turns) in enumerate(episodes) for _ in turns]
    got = group_in_group(
        torch.tensor(totals, dtype=torch.float64),
        torch.tensor([g for g, _ in episodes]),
        torch.tensor([r for _, turns in episodes for _, r in turns], dtype=torch.float64),
        torch.tensor(owner),
        torch.tensor([t == len(turns) - 1 for _, turns in episodes for t in range(len(turns))]),
        torch.tensor([3 * g + state for g, turns in episodes for state, _ in turns]),
        gamma=0.9,
        episode_weight=0.5,
        step_weight=2.0,
        scale=scale,
    )
    assert got.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (60, 0.0), (80, -0.5), (100, -1.0), (500, -1.0)])
def test_overlong_penalty_rises_over_the_buffer(length: int, penalty: float):
    assert overlong_penalty(length, max_length=100, buffer=40) == pytest.approx(penalty)
