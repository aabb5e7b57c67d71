"""Domains of groups: each has its share of every prefix, and a late group costs no more than an early one."""

import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from offbeat.services.rollout.data import interleaving as module
from offbeat.services.rollout.data.interleaving import Interleaving

SHARES = (
    {"a": 0.5, "b": 0.5},
    {"a": 0.4, "b": 0.35, "c": 0.25},
    {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3},
    {"a": 0.3333333, "b": 0.3333333, "c": 0.3333333},
    {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.15, "e": 0.15, "f": 0.1},
    {"a": 1 / 7, "b": 5 / 7, "c": 1 / 7},
    {"a": 0.51234567, "b": 0.48765433},
    {"a": 2**-0.5, "b": 1 - 2**-0.5},
)


@pytest.mark.parametrize("shares", [{"a": 0.5, "b": 0.5}, {"a": 0.4, "b": 0.35, "c": 0.25}, {"a": 1.0}])
def test_every_prefix_has_the_shares(shares: dict[str, float]):
    interleaving, counts = Interleaving(shares), Counter[str]()
    for number in range(500):
        domain, position = interleaving.at(number)
        assert position == counts[domain]
        counts[domain] += 1
        assert all(abs(counts[each] - share * (number + 1)) < 1 for each, share in shares.items())
    assert Interleaving(shares).at(321) == interleaving.at(321)


@pytest.mark.parametrize("shares", [{"a": 0.5, "b": 0.4}, {"a": 1.5, "b": -0.5}])
def test_shares_are_positive_and_sum_to_one(shares: dict[str, float]):
    with pytest.raises(ValueError, match="must be above 0 and sum to 1"):
        Interleaving(shares)


def whole_sequence(shares: dict[str, float]) -> Iterator[tuple[str, int]]:
    """Compute the sequence from its start."""
    values = np.array(list(shares.values())) / sum(shares.values())
    counts = np.zeros(len(shares), dtype=np.int64)
    length = 0
    while True:
        length += 1
        domain = int(np.argmax(values * length - counts))
        yield tuple(shares)[domain], int(counts[domain])
        counts[domain] += 1


@pytest.mark.parametrize("shares", SHARES)
def test_the_sequence_is_that_from_its_start(shares: dict[str, float], monkeypatch: pytest.MonkeyPatch):
    """Blocks of a few groups, so that most numbers are computed from a multiple of the period."""
    monkeypatch.setattr(module, "BLOCK_SIZE", 100)
    expected = [row for row, _ in zip(whole_sequence(shares), range(10_000), strict=False)]
    forward, backward = Interleaving(shares), Interleaving(shares)
    assert [forward.at(number) for number in range(10_000)] == expected
    for number in range(9_999, 0, -977):
        assert backward.at(number) == expected[number]


@pytest.mark.parametrize("shares", SHARES[:6])
def test_a_late_group_costs_no_more_than_an_early_one(shares: dict[str, float]):
    """Three weeks of 128 groups per 30 s are 7.7 million groups, for each worker that starts."""
    sequence = Interleaving(shares)
    began = time.process_time()
    domain, position = sequence.at(50_000_000)
    assert time.process_time() - began < 3
    assert position == pytest.approx(50_000_000 * shares[domain] / sum(shares.values()), abs=1)
    assert sequence.at(50_000_000) == (domain, position)
