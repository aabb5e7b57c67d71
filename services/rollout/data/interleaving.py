"""Domains of groups by number.

Invariant: shares of the first n groups are off by less than one group of a domain with too many. So counts are known after
each multiple of the shares' common denominator, from where a worker that starts computes the sequence.
"""

import math
import threading
from array import array
from collections.abc import Mapping, Sequence
from fractions import Fraction

SHARE_ERROR = 1e-6
ROUNDING_ERROR = 1e-14
MAX_PERIOD = 1_000_000
"""Groups. Shares of a larger common denominator are computed from the first group on."""
BLOCK_SIZE = 1 << 16
"""Minimum groups per block, some 50 ms of computing."""
MAX_BLOCKS = 4


class Interleaving:
    """Sequence of domains in which each has its share of every prefix; thread-safe."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        """Raises ValueError unless the shares are positive and sum to 1."""
        total = sum(shares.values())
        if any(share <= 0 for share in shares.values()) or abs(total - 1) > SHARE_ERROR:
            raise ValueError(f"shares must be above 0 and sum to 1, not to {total:g}")
        self._domains = tuple(shares)
        self._shares = [share / total for share in shares.values()]
        self._fractions, self._block_size = _find_period(self._shares)
        self._blocks: dict[int, _Block] = {}
        self._lock = threading.Lock()

    def at(self, number: int) -> tuple[str, int]:
        """Return a group's domain, and the number of earlier groups of it.

        It may compute a whole block, or without a period the whole sequence: call it in a thread.
        """
        index, offset = divmod(number, self._block_size) if self._block_size else (0, number)
        with self._lock:
            domain, position = self._block(index).at(offset)
        return self._domains[domain], position

    def _block(self, index: int) -> "_Block":
        if index not in self._blocks:
            if len(self._blocks) >= MAX_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            start = index * self._block_size
            counts = [int(fraction * start) for fraction in self._fractions] or [0] * len(self._shares)
            self._blocks[index] = _Block(self._shares, start, counts)
        return self._blocks[index]


class _Block:
    """Part of the sequence, computed as far as it was asked for."""

    def __init__(self, shares: Sequence[float], start: int, counts: list[int]) -> None:
        self._shares = shares
        self._start = start
        self._counts = counts
        self._drawn = array("H")
        self._positions = array("q")

    def at(self, offset: int) -> tuple[int, int]:
        counts, shares, drawn, positions = self._counts, self._shares, self._drawn, self._positions
        for length in range(self._start + len(drawn) + 1, self._start + offset + 2):
            missing = [share * length - count for share, count in zip(shares, counts, strict=True)]
            domain = missing.index(max(missing))
            drawn.append(domain)
            positions.append(counts[domain])
            counts[domain] += 1
        return drawn[offset], positions[offset]


def _find_period(shares: Sequence[float]) -> tuple[list[Fraction], int]:
    """Return exact shares, and a multiple of their common denominator; nothing and 0 without a small one."""
    fractions = [Fraction(share).limit_denominator(MAX_PERIOD) for share in shares]
    is_exact = all(
        abs(fraction - Fraction(share)) < ROUNDING_ERROR for fraction, share in zip(fractions, shares, strict=True)
    )
    period = math.lcm(*(fraction.denominator for fraction in fractions))
    if not is_exact or sum(fractions) != 1 or period > MAX_PERIOD:
        return [], 0
    return fractions, period * math.ceil(BLOCK_SIZE / period)
