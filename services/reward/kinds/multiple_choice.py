"""Letters of choices."""

import re
import string

from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.function import find_answer, require_truth
from offbeat.services.reward.kinds.config import MultipleChoiceConfig
from offbeat.services.reward.sample import RewardSample, final_text

_WRAPPER = re.compile(r"\\(?:text\w*|math(?:rm|bf|it|tt|sf))\s*\{([^{}]*)\}")
_LETTER = re.compile(r"[\s($\[]*([A-Za-z])(?:[\s)$\].]*|[).:]\s.*)", re.DOTALL)
"""`B`, `(B)`, `B.`, `B) text`, `B. text`; not `B or C`, `Both`."""
CHOICE = re.compile(r"[\s($\[]*([A-Za-z])(?:[\s)$\].]*|\)\s.*)", re.DOTALL)
"""`B`, `(B)`, `B.`, `B) text`; not `E. coli`, `n: 5`."""
MAX_CHARS = 500


class MultipleChoice:
    def __init__(self, config: MultipleChoiceConfig) -> None:
        self._letters = string.ascii_uppercase[: config.num_choices]
        self._pattern = config.answer_pattern

    def __call__(self, sample: RewardSample) -> float:
        correct = self._letter_of_row(require_truth(sample))
        answer = find_answer(final_text(sample.response), self._pattern)
        return float(answer is not None and read_letter(answer) == correct)

    def _letter_of_row(self, truth: object) -> str:
        letter = read_letter(str(truth))
        if letter is None and isinstance(truth, int) and 0 <= truth < len(self._letters):  # index, as in MMLU
            letter = self._letters[truth]
        if letter is None or letter not in self._letters:
            wanted = f"neither a letter of {self._letters} nor an index, a number from 0 to {len(self._letters) - 1}"
            raise RewardError(Failure.BAD_ROW, f"ground_truth {str(truth)[:80]!r} is {wanted}")
        return letter


def read_letter(text: str, pattern: re.Pattern[str] = _LETTER) -> str | None:
    """Return the only letter of a choice, in upper case, or None."""
    if len(text) > MAX_CHARS:
        return None
    match = pattern.fullmatch(_WRAPPER.sub(r"\1", text))
    return match[1].upper() if match else None
