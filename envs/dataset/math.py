"""Math problems, compared as expressions by math-verify."""

import logging
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import Field, field_validator

from offbeat.envs.dataset.env import (
    Judgement,
    QuestionEnv,
    QuestionsConfig,
    last_group,
)
from offbeat.envs.dataset.rows import Row
from offbeat.envs.optional_imports import require
from offbeat.envs.parsing import compile_pattern


class MathConfig(QuestionsConfig):
    answer_pattern: str | None = None
    r"""Regular expression of the answer (last match); None takes the last `\boxed{}`."""
    correct_reward: float = Field(default=1.0, gt=0)

    @field_validator("answer_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            compile_pattern(pattern)
        return pattern


class MathEnv(QuestionEnv[MathConfig]):
    r"""A math problem; reward for an equal expression or number in `\boxed{}`.

    math-verify's timeouts need signals, which threads lack; `step_timeout_s` applies instead.
    """

    config_class: ClassVar[type[MathConfig]] = MathConfig
    system_prompt: str = r"Solve the problem. Put the answer into \boxed{}."

    def __init__(self, config: MathConfig) -> None:
        super().__init__(config)
        self._verifier: Any = require("math_verify", "data")
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def judge(self, row: Row, answer: str) -> Judgement:
        pattern = self.config.answer_pattern
        answer_text = last_boxed(answer) if pattern is None else last_group(pattern, answer)
        if answer_text is None:
            return Judgement(0.0, success=False, valid=False)
        is_correct = self._matches(str(row[self.config.answer_key]), answer_text)
        return Judgement(self.config.correct_reward if is_correct else 0.0, success=is_correct)

    def _matches(self, gold: str, answer_text: str) -> bool:
        parsed = _parse(self._verifier, gold if "\\boxed" in gold or "$" in gold else f"${gold}$")
        answer = _parse(
            self._verifier, answer_text if "\\boxed" in answer_text or "$" in answer_text else f"${answer_text}$"
        )
        return bool(parsed and answer and self._verifier.verify(parsed, answer, timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    r"""Return the last `\boxed{...}` with balanced braces, if any."""
    start = text.rfind("\\boxed{")
    depth = 0
    for end in range(max(start, 0), len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if text[end] == "}" and depth == 0:
            return text[start : end + 1] if start >= 0 else None
    return None


@lru_cache(maxsize=4096)
def _parse(verifier: Any, text: str) -> Any:
    return verifier.parse(text, parsing_timeout=None)
