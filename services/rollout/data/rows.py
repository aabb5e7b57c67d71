"""Order of a dataset's rows, by the seed."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

DATA_SEED_STREAM = 0xDA7A
"""Distinct from other uses of the seed."""


def row_of_group(number: int, num_rows: int, seed: int, *, shuffle: bool, stream: int = 0) -> int:
    """Return the row of a group by its admission number: each epoch traverses every row once.

    stream: of a domain, with orders of its own.
    """
    epoch, position = divmod(number, num_rows)
    return int(_permutation(num_rows, seed, epoch, stream)[position]) if shuffle else position


@lru_cache(maxsize=32)
def _permutation(num_rows: int, seed: int, epoch: int, stream: int) -> npt.NDArray[np.int64]:
    key = [seed, DATA_SEED_STREAM, epoch, stream] if stream else [seed, DATA_SEED_STREAM, epoch]
    return np.random.default_rng(key).permutation(num_rows)
