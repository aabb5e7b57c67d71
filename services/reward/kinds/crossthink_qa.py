import re
from collections.abc import Sequence
from typing import cast

from offbeat.envs.dataset.final_answer import last_boxed
from offbeat.envs.dataset.qa import normalize
from offbeat.envs.dataset.text_tables import spellings
from offbeat.services.reward.function import require_truth
from offbeat.services.reward.kinds.config import CrossThinkQAConfig
from offbeat.services.reward.kinds.multiple_choice import CHOICE, read_letter
from offbeat.services.reward.sample import RewardSample, final_text, text_of

TAGS = ("<think>", "</think>")
OUTSIDE_FORMAT = {"loose": 1.0, "soft": 0.5, "strict": 0.0}
MAX_ANSWER_CHARS = 2_000
_OPTION = re.compile(r"(?<!\S)\(?([A-Za-z])[).:]\s+(?=\S)")
_BOX = re.compile(r"\\boxed\s*\{")


class CrossThinkQA:
    def __init__(self, config: CrossThinkQAConfig) -> None:
        self._outside_format = OUTSIDE_FORMAT[config.mode]

    def __call__(self, sample: RewardSample) -> float:
        truth = require_truth(sample)
        truths = cast(Sequence[object], truth) if isinstance(truth, list | tuple) else [truth]
        golds = [text for each in truths for text in spellings(each)]
        answer = _answer(final_text(sample.response))
        options = _find_options(sample) if any(map(_OPTION.match, golds)) else {}
        if answer is None or not any(_is_same(answer, gold, options) for gold in golds):
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


def _find_options(sample: RewardSample) -> dict[str, str]:
    """Return the prompt's last list of at least two options, from A in order: letter -> what follows."""
    options: dict[str, str] = {}
    newest: dict[str, str] = {}
    prompt = "\n".join(text_of(message.get("content")) for message in sample.prompt)
    for match in _OPTION.finditer(prompt):
        letter = match[1].upper()
        if letter == "A":
            newest = {}
        if letter == chr(ord("A") + len(newest)):
            newest[letter] = prompt[match.end() : match.end() + MAX_ANSWER_CHARS]
        if len(newest) > 1:  # an A alone is no list, as of "A: Let's think"
            options = newest
    return options


def _find_choice(gold: str, options: dict[str, str]) -> str | None:
    """Return a gold's letter; `B. text` is a choice if it is one of the prompt's options, as `E. coli` is a text else."""
    if (letter := read_letter(gold, CHOICE)) is not None:
        return letter
    if (match := _OPTION.match(gold)) is None:
        return None
    letter = match[1].upper()
    return letter if normalize(options.get(letter, "")).startswith(normalize(gold[match.end() :])) else None


def _is_same(answer: str, gold: str, options: dict[str, str]) -> bool:
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    if (letter := _find_choice(gold, options)) is not None:
        return read_letter(answer) == letter
    return normalize(answer) == normalize(gold)
