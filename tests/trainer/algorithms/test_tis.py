import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.trainer.algorithms.ratio import token_ratio
from offbeat.trainer.algorithms.tis import truncated_importance_sampling

logprob = st.floats(-6, -0.01)
rows_of = st.lists(st.tuples(logprob, logprob, st.floats(-2, 2)), min_size=1, max_size=12)


@given(rows_of, st.floats(0.5, 4))
def test_gradient_is_truncated_ratio_times_reinforce(rows: list[tuple[float, float, float]], cap: float):
    new, old, advantage = torch.tensor(rows, dtype=torch.float64).T
    new = new.clone().requires_grad_()
    out = truncated_importance_sampling(token_ratio(new, old), new, advantage, upper_bound=cap)
    (gradient,) = torch.autograd.grad(out.loss.sum(), new)
    expected = torch.tensor([-min(math.exp(n - o), cap) * a for n, o, a in rows], dtype=torch.float64)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(out.loss.detach(), expected * new.detach())
    assert out.clipped.tolist() == [math.exp(n - o) > cap for n, o, _ in rows]


def test_extreme_ratios_stay_finite():
    new = torch.tensor([0.0, -1e4], requires_grad=True)
    ratio = token_ratio(new, torch.tensor([-1e4, 0.0]))
    out = truncated_importance_sampling(ratio, new, torch.tensor([-1.0, 1.0]), upper_bound=2.0)
    (gradient,) = torch.autograd.grad(out.loss.sum(), new)
    assert torch.isfinite(out.loss).all()
    assert torch.isfinite(gradient).all()
