"""Patterns in the response."""

import regex

from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.kinds.config import RegexConfig
from offbeat.services.reward.sample import RewardSample, final_text


class Pattern:
    def __init__(self, config: RegexConfig) -> None:
        self._pattern = regex.compile(config.pattern, regex.DOTALL)
        self._is_full = config.match == "full"
        self._is_final = config.text == "final"
        self._timeout_s = config.timeout_s

    def __call__(self, sample: RewardSample) -> float:
        text = final_text(sample.response) if self._is_final else sample.response
        find = self._pattern.fullmatch if self._is_full else self._pattern.search
        try:
            return float(find(text, concurrent=True, timeout=self._timeout_s) is not None)
        except TimeoutError:
            raise RewardError(
                Failure.TIMEOUT,
                f"the pattern is not matched within {self._timeout_s:g} s on {len(text):,} characters: it backtracks "
                "too much; use possessive quantifiers (`*+`) or atomic groups",
            ) from None
