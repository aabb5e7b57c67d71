"""Groups that a step takes from the buffer."""

from dataclasses import dataclass, field

from offbeat.services.messages.types import Group


@dataclass
class StepGroups:
    groups: list[Group] = field(default_factory=list[Group])
    """Trained and masked, in stream order."""
    trained: list[Group] = field(default_factory=list[Group])
    masked: list[Group] = field(default_factory=list[Group])
    """Without signal; counted only in loss denominators."""
    refilled: list[Group] = field(default_factory=list[Group])
    """Groups without signal, replaced by others; they stay in the buffer until the step's checkpoint."""
    num_stale: int = 0
    """Kept beyond `max_staleness` (`stale_policy: train`)."""
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    wait_s: float = 0.0
    score_wait_s: float = 0.0
    """Part of `wait_s`."""
    newest_version: int = 0
    """Groups of later versions are dropped."""
    shaped: dict[int, Group] = field(default_factory=dict[int, Group])
    """`groups` with shaped rewards, by number."""
    are_rows: bool = False

    @property
    def entry_ids(self) -> tuple[str, ...]:
        return tuple(group.entry_id for group in self.groups)
