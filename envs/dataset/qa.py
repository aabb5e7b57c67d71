"""Question answering with exact match or word F1, as in SQuAD (arXiv:1606.05250)."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, Literal, cast

from pydantic import field_validator

from offbeat.envs.dataset.env import (
    Judgement,
    QuestionEnv,
    QuestionsConfig,
    last_group,
)
from offbeat.envs.dataset.rows import Row
from offbeat.envs.dataset.text_tables import spellings
from offbeat.envs.parsing import WHOLE_PATTERN, compile_pattern

ARTICLES = ("a", "an", "the")
PUNCTUATION = re.compile(rf"(?!(?<![\w.)])-\.?\d|(?<=\d)\.\d|(?<![\w.])\.\d)[{re.escape(string.punctuation)}]")
"""All but a number's sign and decimal point."""


class QAConfig(QuestionsConfig):
    metric: Literal["exact_match", "f1"] = "exact_match"
    answer_pattern: str = WHOLE_PATTERN
    """Regular expression of the answer, such as `<answer>(.*?)</answer>`."""

    @field_validator("answer_pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        compile_pattern(pattern)
        return pattern


class QAEnv(QuestionEnv[QAConfig]):
    """A question; the best match among the correct answers counts."""

    config_class: ClassVar[type[QAConfig]] = QAConfig

    def judge(self, row: Row, answer: str) -> Judgement:
        prediction = last_group(self.config.answer_pattern, answer)
        if prediction is None:
            return Judgement(0.0, success=False, valid=False, metrics={"exact_match": 0.0, "f1": 0.0})
        golds = _texts(row[self.config.answer_key])
        exact = float(any(normalize(prediction) == normalize(gold) for gold in golds))
        metrics = {"exact_match": exact, "f1": max((f1(prediction, gold) for gold in golds), default=0.0)}
        return Judgement(metrics[self.config.metric], success=bool(exact), metrics=metrics)


def normalize(text: str) -> str:
    """Lowercase; remove punctuation outside numbers, articles and repeated spaces, but not all of a text."""
    text = text.lower()
    words = PUNCTUATION.sub("", text).split()
    return " ".join(word for word in words if word not in ARTICLES) or " ".join(words) or text.strip()


def f1(prediction: str, gold: str) -> float:
    """Return the word F1; 1 if both are empty."""
    a, b = normalize(prediction).split(), normalize(gold).split()
    if not a or not b:
        return float(a == b)
    same = sum((Counter(a) & Counter(b)).values())
    return 2 * same / (len(a) + len(b))


def _texts(answer: object) -> list[str]:
    if isinstance(answer, dict):  # SQuAD: {"text": [...], "answer_start": [...]}
        answer = cast(dict[str, object], answer).get("text", [])
    if isinstance(answer, Sequence) and not isinstance(answer, str):
        return [text for each in cast(Sequence[object], answer) for text in spellings(each)]
    return spellings(answer)
