"""Math answers, compared as expressions."""

from offbeat.envs.dataset.math import matches
from offbeat.envs.optional_imports import require
from offbeat.services.reward.function import find_answer, require_truth
from offbeat.services.reward.kinds.config import MathRuleConfig
from offbeat.services.reward.sample import RewardSample, final_text


class MathRule:
    def __init__(self, config: MathRuleConfig) -> None:
        """Raises ValueError without math-verify."""
        require("math_verify", "data")
        self._pattern = config.answer_pattern

    def __call__(self, sample: RewardSample) -> float:
        truth = str(require_truth(sample))
        answer = find_answer(final_text(sample.response), self._pattern)
        return float(answer is not None and matches(truth, answer))
