"""The staleness bound outside Redis: how many groups may start, and which versions a step may still consume.

Invariant: the same answers as `lua/admission.lua`.
"""

import math
from dataclasses import dataclass

from offbeat.services.buffer.api import Admission, BufferLimits


@dataclass(frozen=True, slots=True)
class GroupCounts:
    standing: int
    """Admitted, neither dropped nor failed."""
    playing: int
    """Being assembled."""


def count_admissible(limits: BufferLimits, step: int | None, counts: GroupCounts) -> tuple[int, Admission]:
    """Return how many groups may start, and their limit. step: of the last published weights; None before the first."""
    if step is None:
        return 0, Admission.NO_WEIGHTS
    lookahead = math.ceil((step + limits.max_staleness + 1) * limits.groups_per_step - 1e-6)
    rooms = (
        (limits.total_groups - counts.standing, Admission.ALL_ADMITTED),
        (lookahead - counts.standing, Admission.STALENESS_BOUND),
        (limits.max_groups_in_flight - counts.playing, Admission.GROUPS_IN_FLIGHT),
    )
    for room, limit in rooms:
        if room <= 0:
            return 0, limit
    return min(room for room, _ in rooms), Admission.OPEN


def oldest_consumable(step: int, max_staleness: float) -> int:
    """Return the oldest version that batch `step` (0-based) may consume."""
    return step - math.ceil(max_staleness)
