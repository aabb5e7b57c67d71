import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.trainer.algorithms.gae import generalized_advantages
from offbeat.trainer.algorithms.reinforce import discounted_returns

number = st.floats(-3, 3)
rows_of = st.lists(st.lists(st.tuples(number, number), min_size=1, max_size=8), min_size=1, max_size=5)


def slow(row: list[tuple[float, float]], gamma: float, lambd: float) -> list[float]:
    """The exponentially weighted average of k-step advantages, eq. 14 to 16 of the paper, for one trajectory."""
    rewards, values = [r for r, _ in row], [v for _, v in row] + [0.0]
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(len(row))]
    return [sum((gamma * lambd) ** (k - t) * deltas[k] for k in range(t, len(row))) for t in range(len(row))]


@given(rows_of, st.floats(0, 1), st.floats(0, 1))
def test_gae_sums_discounted_residuals_within_trajectory(
    rows: list[list[tuple[float, float]]], gamma: float, lambd: float
):
    rewards, values = torch.tensor([pair for row in rows for pair in row], dtype=torch.float64).T
    last = torch.tensor([i == len(row) - 1 for row in rows for i in range(len(row))])
    expected = torch.tensor([a for row in rows for a in slow(row, gamma, lambd)], dtype=torch.float64)
    got = generalized_advantages(rewards, values, last, gamma, lambd)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


REWARDS, VALUES = torch.tensor([0.0, 2.0, 1.0]), torch.tensor([0.3, -0.2, 0.7])
LAST = torch.tensor([False, False, True])


def test_gae_with_lambda_one_is_return_minus_value():
    expected = discounted_returns(REWARDS, LAST, 0.9) - VALUES
    torch.testing.assert_close(generalized_advantages(REWARDS, VALUES, LAST, 0.9, 1.0), expected)


def test_gae_with_lambda_zero_is_one_step_residual():
    expected = torch.tensor([0.9 * -0.2 - 0.3, 2.0 + 0.9 * 0.7 + 0.2, 1.0 - 0.7])
    torch.testing.assert_close(generalized_advantages(REWARDS, VALUES, LAST, 0.9, 0.0), expected)


def test_empty_input_gives_empty_output():
    empty = torch.zeros(0)
    assert generalized_advantages(empty, empty, torch.zeros(0, dtype=torch.bool), 0.9, 0.9).shape == (0,)
