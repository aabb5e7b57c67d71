"""Reduction of a series that keeps its extremes."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def keep_extremes(values: Floats, count: int) -> npt.NDArray[np.int64]:
    """Return at most `count` ascending indexes: both ends, and the smallest and largest value of each bucket."""
    if len(values) <= count:
        return np.arange(len(values))
    borders = np.linspace(0, len(values), max(1, count // 2 - 1) + 1).astype(np.int64)
    lows = _argextremes(values, borders)
    highs = _argextremes(-values, borders)
    return np.unique(np.concatenate([[0], lows, highs, [len(values) - 1]]))


def _argextremes(values: Floats, borders: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the index of each bucket's first smallest value."""
    lowest = np.minimum.reduceat(values, borders[:-1])
    hits = np.flatnonzero(values == np.repeat(lowest, np.diff(borders)))
    return hits[np.searchsorted(hits, borders[:-1])]
