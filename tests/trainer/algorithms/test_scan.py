import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.trainer.algorithms.scan import discounted_sums

rows_of = st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=20), min_size=1, max_size=6)


def flat(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    return values, torch.tensor([i == len(row) - 1 for row in rows for i in range(len(row))])


@given(rows_of, st.floats(0, 1))
def test_sums_are_discounted_towards_each_rows_end_and_never_beyond(rows: list[list[float]], decay: float):
    expected = [sum(decay**k * x for k, x in enumerate(row[t:])) for row in rows for t in range(len(row))]
    got = discounted_sums(*flat(rows), decay)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_a_long_row_is_summed_exactly():
    values, last = flat([[1.0] * 10_000])
    torch.testing.assert_close(discounted_sums(values, last, 1.0), torch.arange(10_000, 0, -1, dtype=torch.float64))


def test_values_that_end_nowhere_are_refused():
    with pytest.raises(ValueError, match="last of its trajectory"):
        discounted_sums(torch.ones(2), torch.tensor([True, False]), 1.0)


def test_empty_input_gives_empty_output():
    assert discounted_sums(torch.zeros(0), torch.zeros(0, dtype=torch.bool), 0.5).shape == (0,)
