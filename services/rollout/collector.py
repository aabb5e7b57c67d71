"""Python's garbage collector in a process that holds thousands of living episodes.

What imports, envs and episodes allocate lives long, and none of it is cyclic garbage; the collector would walk all
of it again and again, at a cost per trajectory that grows with the number of episodes in hand.
"""

import gc

YOUNG_OBJECTS = 20_000
"""Allocations between two collections of the youngest generation; Python's own 700 is a few turns of a busy worker."""
YOUNG_PER_MIDDLE, MIDDLE_PER_OLD = 20, 20


def calm_collector() -> None:
    """Leave what exists now to itself, and look for garbage among the rest more rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_PER_MIDDLE, MIDDLE_PER_OLD)
