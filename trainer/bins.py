"""Sequences into bins under a token budget: as few as the budget allows, alike in tokens, similar lengths together."""

from collections.abc import Sequence


def balanced_bins(lengths: Sequence[int], budget: int, multiple_of: int = 1) -> list[list[int]]:
    """Indexes of `lengths` in bins of at most `budget` in sum; one that is longer is alone in its bin.

    Neighbours by length share a bin. The number of bins is a multiple of `multiple_of` where there are sequences enough.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    fewest = len(_fill(order, lengths, budget))
    wanted = min(-(-fewest // multiple_of) * multiple_of, len(order))
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        if len(_fill(order, lengths, middle)) <= wanted:
            high = middle
        else:
            low = middle + 1
    bins = _fill(order, lengths, high)
    while len(bins) < wanted:
        _split_largest(bins, lengths)
    return bins


def _fill(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Runs of `order`, each as long as `capacity` allows."""
    bins: list[list[int]] = []
    filled = 0
    for i in order:
        if not bins or filled + lengths[i] > capacity:
            bins.append([])
            filled = 0
        bins[-1].append(i)
        filled += lengths[i]
    return bins


def _split_largest(bins: list[list[int]], lengths: Sequence[int]) -> None:
    """Halve, in place, the fullest of the bins that hold more than one sequence."""
    divisible = [k for k, members in enumerate(bins) if len(members) > 1]
    fullest = max(divisible, key=lambda k: sum(lengths[i] for i in bins[k]))
    members = bins[fullest]
    bins[fullest : fullest + 1] = [members[: len(members) // 2], members[len(members) // 2 :]]
