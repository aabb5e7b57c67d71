"""Python's garbage collector in a process that holds thousands of living episodes.

What imports, envs and episodes allocate lives long, and little of it is cyclic garbage; the collector would walk all
of it again and again, at a cost per trajectory that grows with the number of episodes in hand.
"""

import gc

LEAST_YOUNG_OBJECTS = 20_000
"""New objects until the youngest generation is collected; Python's own 700 is a few turns of a busy worker."""
OBJECTS_PER_EPISODE = 100
"""About what an episode holds. Many that are played together make and drop so many together: only where more are new is some
of it likely to be garbage."""
YOUNG_PER_MIDDLE, MIDDLE_PER_OLD = 20, 20


def calm_collector(episodes: int) -> None:
    """Leave what exists now to itself, and look for garbage among the rest more rarely.

    episodes: that are played at a time at most.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(max(LEAST_YOUNG_OBJECTS, OBJECTS_PER_EPISODE * episodes), YOUNG_PER_MIDDLE, MIDDLE_PER_OLD)
