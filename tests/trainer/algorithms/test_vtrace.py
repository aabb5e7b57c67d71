import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.trainer.algorithms.gae import generalized_advantages
from offbeat.trainer.algorithms.scan import weighted_sums
from offbeat.trainer.algorithms.vtrace import vtrace

Rows = list[list[tuple[float, float, float]]]
"""Trajectories of (reward, value, ratio)."""
number = st.floats(-3, 3)
rows_of = st.lists(
    st.lists(st.tuples(number, number, st.floats(0.01, 5)), min_size=1, max_size=7), min_size=1, max_size=4
)


def last_of(rows: Rows) -> torch.Tensor:
    return torch.tensor([i == len(row) - 1 for row in rows for i in range(len(row))])


@settings(max_examples=40)
@given(rows_of, st.floats(0, 1), st.floats(0, 1), st.floats(0.5, 3), st.floats(0.1, 2))
def test_targets_equal_the_papers_equation(rows: Rows, gamma: float, lambd: float, rho_bar: float, c_bar: float):
    expected = []
    for row in rows:
        values = [v for _, v, _ in row] + [0.0]
        for t in range(len(row)):
            total, trace = values[t], 1.0
            for k in range(t, len(row)):
                reward, _, ratio = row[k]
                total += gamma ** (k - t) * trace * min(rho_bar, ratio) * (reward + gamma * values[k + 1] - values[k])
                trace *= lambd * min(c_bar, ratio)
            expected.append(total)
    rewards, values, ratio = torch.tensor([x for row in rows for x in row], dtype=torch.float64).T
    got = vtrace(rewards, values, ratio, last_of(rows), gamma=gamma, lambd=lambd, rho_bar=rho_bar, c_bar=c_bar)
    assert got.targets.tolist() == pytest.approx(expected, abs=1e-9)


@settings(max_examples=40)
@given(rows_of, st.floats(0, 1), st.floats(0, 1), st.floats(0.5, 3), st.floats(0.1, 2))
def test_advantages_times_ratio_equal_rlax(rows: Rows, gamma: float, lambd: float, rho_bar: float, c_bar: float):
    """`rlax.vtrace_td_error_and_advantage`: errors backwards by e_t = rho_t d_t + gamma c_t e_{t+1}, targets v = V + e, and
    min(rho_bar, ratio) (r_t + gamma (lambda v_{t+1} + (1 - lambda) V_{t+1}) - V_t)."""
    expected = []
    for row in rows:
        values, targets, error, of_row = [v for _, v, _ in row] + [0.0], [0.0] * (len(row) + 1), 0.0, []
        for t in reversed(range(len(row))):
            reward, _, ratio = row[t]
            bootstrap = lambd * targets[t + 1] + (1 - lambd) * values[t + 1]
            of_row.append(min(rho_bar, ratio) * (reward + gamma * bootstrap - values[t]))
            delta = min(rho_bar, ratio) * (reward + gamma * values[t + 1] - values[t])
            error = delta + gamma * lambd * min(c_bar, ratio) * error
            targets[t] = values[t] + error
        expected += reversed(of_row)
    rewards, values, ratio = torch.tensor([x for row in rows for x in row], dtype=torch.float64).T
    got = vtrace(rewards, values, ratio, last_of(rows), gamma=gamma, lambd=lambd, rho_bar=rho_bar, c_bar=c_bar)
    assert (ratio.clamp(max=rho_bar) * got.advantages).tolist() == pytest.approx(expected, abs=1e-9)


@settings(max_examples=20)
@given(rows_of, st.floats(0, 1), st.floats(0, 1))
def test_on_policy_vtrace_equals_gae(rows: Rows, gamma: float, lambd: float):
    rewards, values, ratio = torch.tensor([x for row in rows for x in row], dtype=torch.float64).T
    last = last_of(rows)
    got = vtrace(rewards, values, torch.ones_like(ratio), last, gamma=gamma, lambd=lambd, rho_bar=1.0, c_bar=1.0)
    expected = generalized_advantages(rewards, values, last, gamma, lambd)
    torch.testing.assert_close(got.advantages, expected)
    torch.testing.assert_close(got.targets, expected + values)


def test_scan_requires_complete_trajectories():
    with pytest.raises(ValueError, match="last"):
        weighted_sums(torch.ones(2), torch.ones(2), torch.tensor([True, False]))
    assert weighted_sums(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.bool)).shape == (0,)
