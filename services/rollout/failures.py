"""Why an episode could not be played: data for the buffer, never the end of a worker."""

from services.errors import RolloutError


class EpisodeError(RolloutError):
    """One episode ended without a trajectory.

    reason: a short name that episodes are counted by (`step_timeout`); the message holds the details.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
