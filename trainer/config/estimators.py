"""Advantage estimators and policy losses by what they compare, read or ignore."""

from typing import Literal

from offbeat.trainer.config.user_function import ANY_FUNCTION

Estimator = Literal[
    "gae",
    "reinforce",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "opo",
    "maxrl",
    "gdpo",
    "gigpo",
    "step_reinforce",
    "agentic_reinforce",
    "remax",
    "opd",
]
RewardMethod = Literal["identity", "mean", "mean_std", "std"]

GROUP_METHODS: dict[str, RewardMethod] = {
    "grpo": "mean_std",
    "gdpo": "mean_std",
    "gigpo": "mean_std",
    "dr_grpo": "mean",
    "reinforce_plus_plus_baseline": "mean",
}
"""Default normalization of estimators that compare a group."""
BASELINES = ("rloo", "opo", "maxrl", "remax")
"""Estimators with their own baseline."""
DECOUPLED = ("gdpo",)
"""Estimators that compare each reward function's values on their own."""
GREEDY_BASELINE = ("remax",)
TURN_WISE = ("gigpo", "step_reinforce")
"""One advantage per turn."""
WHITENING = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
DISTILLING = ("opd",)
"""Estimators that ignore rewards."""
WITH_RATIO = ("ppo", "tis", "cispo", "topr", "sapo", ANY_FUNCTION)
"""Losses with `ratio_type`."""
WITHOUT_RATIO = ("vanilla", "gpg")
"""Losses that do not read recorded logprobs."""
AGAINST_BEHAVIOR = ("aipo", "dppo_tv")
"""Losses with a ratio to the behavior policy."""
