"""Failures of reward functions, each with a reason to count by."""

from enum import StrEnum

from offbeat.services.errors import EpisodeError


class Failure(StrEnum):
    TIMEOUT = "reward_timeout"
    UNAVAILABLE = "reward_unavailable"
    """No answer after all attempts."""
    MALFORMED = "reward_malformed"
    """The judge or service answered something else than a score."""
    ERROR = "reward_error"
    """The function raised."""
    BAD_ROW = "bad_row"
    """The row lacks what the reward needs."""
    NO_REWARD = "no_reward"
    """No reward is configured for the sample's tag."""


ATTEMPTED_AGAIN = frozenset({Failure.TIMEOUT, Failure.MALFORMED})
"""Failures that another attempt may mend; an unavailable service is retried by time."""


class RewardError(EpisodeError):
    """A sample without a score: its episode fails and is not trained as if the reward were zero."""

    def __init__(self, failure: Failure, detail: str, trace: str = "") -> None:
        super().__init__(failure.value, detail, trace)
        self.failure = failure
        self.detail = detail
