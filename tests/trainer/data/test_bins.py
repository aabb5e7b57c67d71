import itertools

from hypothesis import given
from hypothesis import strategies as st

from offbeat.trainer.data.batch import balanced_bins

lengths_of = st.lists(st.integers(1, 50), max_size=30)


def fewest_by_length(lengths: list[int], budget: int) -> int:
    """Bins that runs of neighbours by length need at least, by trying every first run."""
    ordered = sorted(lengths)
    best = [0] * (len(ordered) + 1)
    for i in range(len(ordered) - 1, -1, -1):
        ends = [j for j in range(i + 1, len(ordered) + 1) if sum(ordered[i:j]) <= budget or j == i + 1]
        best[i] = 1 + min(best[j] for j in ends)
    return best[0]


@given(lengths_of, st.integers(1, 120), st.integers(1, 4))
def test_every_sequence_is_in_one_bin_inside_the_budget(lengths: list[int], budget: int, ranks: int):
    bins = balanced_bins(lengths, budget, ranks)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(members for members in bins)
    assert all(sum(lengths[i] for i in members) <= budget or len(members) == 1 for members in bins)
    assert len(bins) % ranks == 0 or len(bins) == len(lengths)
    assert bins == balanced_bins(lengths, budget, ranks)


@given(lengths_of, st.integers(1, 120))
def test_number_of_bins_is_minimal_for_neighbours_by_length(lengths: list[int], budget: int):
    assert len(balanced_bins(lengths, budget)) == fewest_by_length(lengths, budget)


@given(lengths_of, st.integers(1, 120), st.integers(1, 4))
def test_a_bin_holds_neighbours_by_length(lengths: list[int], budget: int, ranks: int):
    spans = [
        (min(lengths[i] for i in members), max(lengths[i] for i in members))
        for members in balanced_bins(lengths, budget, ranks)
    ]
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))


def test_equal_sequences_are_spread_evenly():
    assert [len(members) for members in balanced_bins([10] * 12, 50)] == [4, 4, 4]
    assert [len(members) for members in balanced_bins([10] * 12, 1000, multiple_of=4)] == [3, 3, 3, 3]


def test_bin_is_split_when_a_rank_would_be_idle():
    bins = balanced_bins([5] * 4, 100, multiple_of=3)
    assert sorted(len(members) for members in bins) == [1, 1, 2]
    assert len(balanced_bins([5] * 2, 100, multiple_of=3)) == 2


def test_no_sequences_need_no_bins():
    assert balanced_bins([], 10, 4) == []
