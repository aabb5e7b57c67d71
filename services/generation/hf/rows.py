"""Rows of the KV cache, and prefixes that prompts may reuse.

Invariants: a row is reused only under the weights that computed it; the least recently used idle row is reused first.
"""

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

CHUNK = 16
"""Granularity of indexed prefixes, tokens."""
MAX_CANDIDATES = 16
"""Rows compared per look-up."""


@dataclass(slots=True)
class CacheRow:
    """Tokens whose keys and values a row holds, or will hold."""

    number: int
    tokens: array = field(default_factory=lambda: array("i"))
    computed: int = 0
    chunks: list[int] = field(default_factory=list[int])
    """Digests of the indexed prefixes of `tokens`."""
    is_idle: bool = False
    adapter: str = ""
    """Adapter of the keys and values."""


@dataclass(frozen=True, slots=True)
class Match:
    """Row with the longest common prefix."""

    row: CacheRow
    length: int
    """Tokens in common."""

    @property
    def usable(self) -> int:
        return min(self.length, self.row.computed)


class RowStore:
    def __init__(self, num_rows: int, *, shares_prefixes: bool) -> None:
        self._shares = shares_prefixes
        self._free = list(range(num_rows))
        self._idle: OrderedDict[int, CacheRow] = OrderedDict()
        self._index: dict[int, dict[int, CacheRow]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    def find(self, prompt: array, adapter: str = "") -> Match | None:
        """Return the adapter's row that shares most of a prompt; the last token's logits are needed."""
        best: Match | None = None
        for digest in reversed(_digests(prompt, adapter)):
            rows = (row for row in self._index.get(digest, {}).values() if row.adapter == adapter)
            for row in islice(rows, MAX_CANDIDATES):
                match = Match(row, _common_length(prompt, row.tokens, len(prompt) - 1))
                if best is None or (match.usable, row.is_idle) > (best.usable, best.row.is_idle):
                    best = match
            if best is not None:
                return best
        return None

    def take(self, prompt: array, match: Match | None, adapter: str = "") -> tuple[CacheRow, int]:
        """Take a row for a prompt; return it and how many of the match's tokens to copy. A row that holds only a prefix
        of the prompt is extended.
        """
        if match is not None and match.row.is_idle and match.usable == match.row.computed:
            row, copied = match.row, 0
            del self._idle[row.number]
        else:
            if match is not None and match.row.is_idle:
                self._idle.move_to_end(match.row.number)
            row, copied = self._take_any(match), 0 if match is None else match.usable
            row.computed = copied
        self._forget(row)
        row.is_idle = False
        row.tokens, row.adapter = array("i", prompt), adapter
        self._remember(row)
        return row, copied

    def keep(self, row: CacheRow, tokens: Sequence[int]) -> None:
        """Keep a finished sequence's row for reuse."""
        if not self._shares or row.computed < CHUNK:
            self.free(row)
            return
        self._forget(row)
        row.tokens = array("i", tokens[: row.computed])
        row.is_idle = True
        self._remember(row)
        self._idle[row.number] = row

    def free(self, row: CacheRow) -> None:
        self._forget(row)
        self._idle.pop(row.number, None)
        heapq.heappush(self._free, row.number)

    def hide(self, rows: Iterable[CacheRow]) -> None:
        """Exclude rows of older weights from reuse."""
        for row in rows:
            self._forget(row)

    def drop_idle(self, adapter: str | None = None) -> None:
        """Free idle rows, or those of one adapter."""
        for row in [each for each in self._idle.values() if adapter in (None, each.adapter)]:
            self.free(row)

    def _take_any(self, match: Match | None) -> CacheRow:
        """Take a free row, else the least recently used idle one except the match's."""
        if self._free:
            return CacheRow(heapq.heappop(self._free))
        kept = match.row if match is not None else None
        row = next((each for each in self._idle.values() if each is not kept), None) or next(iter(self._idle.values()))
        del self._idle[row.number]
        return row

    def _remember(self, row: CacheRow) -> None:
        if self._shares:
            row.chunks = _digests(row.tokens, row.adapter)
            for digest in row.chunks:
                self._index.setdefault(digest, {})[row.number] = row

    def _forget(self, row: CacheRow) -> None:
        for digest in row.chunks:
            rows = self._index[digest]
            del rows[row.number]
            if not rows:
                del self._index[digest]
        row.chunks = []


def _digests(tokens: array, adapter: str) -> list[int]:
    """Return digests of the prefixes of a multiple of `CHUNK` tokens."""
    data, digest, out = tokens.tobytes(), hash(adapter), list[int]()
    step = CHUNK * tokens.itemsize
    for start in range(0, len(data) - step + 1, step):
        digest = hash((digest, data[start : start + step]))
        out.append(digest)
    return out


def _common_length(a: array, b: array, limit: int) -> int:
    x, y = (np.frombuffer(each, np.int32)[:limit] for each in (a, b))
    length = min(len(x), len(y))
    differing = np.flatnonzero(x[:length] != y[:length])
    return int(differing[0]) if len(differing) else length
