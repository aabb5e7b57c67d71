"""Math problems, compared as expressions by math-verify."""

import re
from typing import ClassVar

from pydantic import Field, field_validator

from offbeat.envs.dataset.env import (
    Judgement,
    QuestionEnv,
    QuestionsConfig,
    last_group,
)
from offbeat.envs.dataset.final_answer import candidates, last_boxed, read_formula
from offbeat.envs.dataset.math_checker import is_equal
from offbeat.envs.dataset.rows import Row
from offbeat.envs.optional_imports import require
from offbeat.envs.parsing import compile_pattern


class MathConfig(QuestionsConfig):
    answer_pattern: str | None = None
    r"""Regular expression of the answer (last match); None: the last `\boxed{}`."""
    correct_reward: float = Field(default=1.0, gt=0)

    @field_validator("answer_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            compile_pattern(pattern)
        return pattern


class MathEnv(QuestionEnv[MathConfig]):
    r"""A math problem; reward for one final expression or number in `\boxed{}` that equals the answer."""

    config_class: ClassVar[type[MathConfig]] = MathConfig
    system_prompt: str = r"Solve the problem. Put the answer into \boxed{}."

    def __init__(self, config: MathConfig) -> None:
        super().__init__(config)
        require("math_verify", "data")

    def judge(self, row: Row, answer: str) -> Judgement:
        pattern = self.config.answer_pattern
        text = answer if pattern is None else last_group(pattern, answer)
        boxed = None if text is None else last_boxed(text)
        answer_text = text if boxed is None and pattern is not None else boxed
        if answer_text is None:
            return Judgement(0.0, success=False, valid=False)
        is_correct = matches(str(row[self.config.answer_key]), answer_text)
        return Judgement(self.config.correct_reward if is_correct else 0.0, success=is_correct)


def matches(gold: str, answer_text: str) -> bool:
    boxed = last_boxed(gold)
    golds = read_formula(gold if boxed is None else boxed) or [gold]
    if len(golds) == 2 and re.fullmatch(r"\d{1,3}, \d{3}", golds[1]):  # 1,234 alone is a number in datasets
        golds.pop()
    return any(_is_same(each, answer) for answer in read_formula(answer_text) for each in golds)


def _is_same(gold: str, answer: str) -> bool:
    if not answer:
        return False
    if answer == gold:
        return True
    sides = candidates(answer, gold)
    return bool(sides) and all(is_equal(gold, side) for side in sides)
