import re
from collections.abc import Sequence
from typing import cast

from offbeat.envs.dataset.final_answer import last_boxed
from offbeat.envs.dataset.qa import normalize
from offbeat.envs.dataset.text_tables import spellings
from offbeat.services.reward.function import require_truth
from offbeat.services.reward.kinds.config import CrossThinkQAConfig
from offbeat.services.reward.kinds.multiple_choice import CHOICE, read_letter
from offbeat.services.reward.sample import RewardSample, final_text

TAGS = ("<think>", "</think>")
OUTSIDE_FORMAT = {"loose": 1.0, "soft": 0.5, "strict": 0.0}
MAX_ANSWER_CHARS = 2_000
_BOX = re.compile(r"\\boxed\s*\{")


class CrossThinkQA:
    def __init__(self, config: CrossThinkQAConfig) -> None:
        self._outside_format = OUTSIDE_FORMAT[config.mode]

    def __call__(self, sample: RewardSample) -> float:
        truth = require_truth(sample)
        truths = cast(Sequence[object], truth) if isinstance(truth, list | tuple) else [truth]
        golds = [text for each in truths for text in spellings(each)]
        answer = _answer(final_text(sample.response))
        if answer is None or not any(_is_same(answer, gold) for gold in golds):
            return 0.0
        return 1.0 if has_format(sample.response) else self._outside_format


def has_format(response: str) -> bool:
    """Return whether the response is one thought, then text with exactly one answer."""
    text = response.strip()
    if not text.startswith(TAGS[0]) or any(text.count(tag) != 1 for tag in TAGS):
        return False
    thought, _, rest = text.removeprefix(TAGS[0]).partition(TAGS[1])
    num_answers = rest.count("<answer>") or len(_BOX.findall(rest))
    return bool(thought.strip()) and num_answers == 1 and _answer(rest) is not None


def _answer(text: str) -> str | None:
    """Return the last answer; one in tags may be boxed."""
    head, _, _ = text.rpartition("</answer>")
    _, start, tagged = head.rpartition("<answer>")
    answer = tagged if start else text
    boxed = last_boxed(answer)
    if boxed is None and not start:
        return None
    return (answer if boxed is None else boxed).strip()


def _is_same(answer: str, gold: str) -> bool:
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    if (letter := read_letter(gold, CHOICE)) is not None:
        return read_letter(answer) == letter
    return normalize(answer) == normalize(gold)
