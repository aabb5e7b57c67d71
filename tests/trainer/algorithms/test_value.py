import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.trainer.algorithms.value import value_loss

number = st.floats(-3, 3)
rows_of = st.lists(st.tuples(number, number, number), min_size=1, max_size=12)


@given(rows_of, st.none() | st.floats(0.05, 2))
def test_value_loss_is_half_squared_error_or_larger_clipped_one(
    rows: list[tuple[float, float, float]], clip: float | None
):
    values, old, returns = torch.tensor(rows, dtype=torch.float64).T
    expected = []
    for v, o, r in rows:
        error = (v - r) ** 2
        if clip is not None:
            near = min(max(v, o - clip), o + clip)
            error = max(error, (near - r) ** 2)
        expected.append(0.5 * error)
    got = value_loss(values, old, returns, clip=clip)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_clipped_value_gets_no_gradient_beyond_the_clip():
    values = torch.tensor([2.0, 0.1, -2.0], dtype=torch.float64, requires_grad=True)
    old, returns = torch.zeros(3, dtype=torch.float64), torch.tensor([3.0, 1.0, 1.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(value_loss(values, old, returns, clip=0.5).sum(), values)
    torch.testing.assert_close(gradient, torch.tensor([0.0, -0.9, -3.0], dtype=torch.float64))
