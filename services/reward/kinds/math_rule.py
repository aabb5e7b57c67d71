"""Math answers, compared as expressions."""

from offbeat.envs.dataset.env import last_group
from offbeat.envs.dataset.final_answer import last_boxed
from offbeat.envs.dataset.math import matches
from offbeat.envs.optional_imports import require
from offbeat.services.reward.function import require_truth
from offbeat.services.reward.kinds.config import MathRuleConfig
from offbeat.services.reward.sample import RewardSample, final_text


class MathRule:
    def __init__(self, config: MathRuleConfig) -> None:
        """Raises ValueError without math-verify."""
        require("math_verify", "data")
        self._pattern = config.answer_pattern

    def __call__(self, sample: RewardSample) -> float:
        truth = str(require_truth(sample))
        text = final_text(sample.response)
        answer = last_boxed(text)
        if answer is None and self._pattern is not None:
            answer = last_group(self._pattern, text)
        return float(answer is not None and matches(truth, answer))
