"""Limits of restarts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Restart limits since the run last progressed."""

    max_restarts: int = 5
    backoff_s: float = 0.25
    """Delay before the second restart, doubled for each further one."""
    max_backoff_s: float = 15.0
    drain_timeout_s: float = 60.0

    def delay_s(self, count: int) -> float:
        return 0.0 if count <= 1 else min(self.backoff_s * 2.0 ** (count - 2), self.max_backoff_s)
