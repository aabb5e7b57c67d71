from enum import StrEnum

from offbeat.services.errors import EpisodeError


class Failure(StrEnum):
    TIMEOUT = "reward_timeout"
    UNAVAILABLE = "reward_unavailable"
    """No answer after all attempts."""
    MALFORMED = "reward_malformed"
    """No score in a reply."""
    ERROR = "reward_error"
    """The function raised."""
    BAD_ROW = "bad_row"
    """The row lacks what the reward needs."""
    NO_REWARD = "no_reward"
    """No reward is configured for the sample's tag."""


ATTEMPTED_AGAIN = frozenset({Failure.TIMEOUT, Failure.MALFORMED})
"""Failures that another attempt may fix."""


class RewardError(EpisodeError):
    """A sample without a score: its episode fails and is not trained."""

    def __init__(self, failure: Failure, detail: str, trace: str = "") -> None:
        super().__init__(failure.value, detail, trace)
        self.failure = failure
