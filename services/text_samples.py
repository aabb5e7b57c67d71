"""Text samples of trajectories, for consoles and trackers."""

import time
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

CUT = " [...] "
COLUMNS = ("step", "version", "tag", "score", "prompt", "answers", "actions")
INTERVAL_S = 60.0
"""Minimum between samples on a console."""


@dataclass(frozen=True, slots=True)
class TextSample:
    """Excerpt of a trained trajectory."""

    step: int
    """Optimizer step that trained it."""
    version: int
    """Oldest that sampled it; -1: none."""
    tag: str
    score: float
    """As the env gave it."""
    prompt: str
    """Of the first turn, with the chat template."""
    answers: tuple[str, ...]
    actions: tuple[str, ...]
    """By the env's `action_pattern`."""


def cut_middle(text: str, max_chars: int) -> str:
    """Cut the middle of a text of more than `max_chars` characters."""
    if len(text) <= max_chars:
        return text
    kept = max(max_chars - len(CUT), 2)
    return text[: (kept + 1) // 2] + CUT + text[len(text) - kept // 2 :]


def escape(text: str) -> str:
    """Replace control, format (e.g. bidirectional) and unpaired surrogate characters."""
    return "".join(_escape_char(char) for char in text)


def _escape_char(char: str) -> str:
    if char == "\\" or (unicodedata.category(char)[0] != "C" and char not in "\u2028\u2029"):
        return char
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def describe_samples(samples: Sequence[TextSample], max_chars: int = 160) -> str:
    """Return up to four lines per sample for a console. max_chars: per text."""
    lines: list[str] = []
    for sample in samples:
        version = "no sampled token" if sample.version < 0 else f"version {sample.version}"
        lines += [
            f"Sample of step {sample.step}: {escape(cut_middle(sample.tag, max_chars))}, score {sample.score:g}, {version}",
            f"  prompt   {escape(cut_middle(sample.prompt, max_chars))}",
            f"  answers  {escape(cut_middle(' | '.join(sample.answers), max_chars))}",
        ]
        if sample.actions != sample.answers:
            lines.append(f"  actions  {escape(cut_middle(' | '.join(sample.actions), max_chars))}")
    return "\n".join(lines)


def to_text(sample: TextSample) -> str:
    turns = zip(sample.answers, sample.actions, strict=True)
    lines = [f"answer {i + 1}: {answer}\naction {i + 1}: {action}" for i, (answer, action) in enumerate(turns)]
    heading = f"step {sample.step}, version {sample.version}, tag {sample.tag}, score {sample.score:g}"
    return "\n".join([heading, f"prompt: {sample.prompt}", *lines])


def to_columns(samples: Sequence[TextSample]) -> dict[str, list[Any]]:
    """Return a table: column -> a value per sample; answers and actions a line each."""
    rows = [{**asdict(s), "answers": "\n".join(s.answers), "actions": "\n".join(s.actions)} for s in samples]
    return {name: [row[name] for row in rows] for name in COLUMNS}


class SampleClock:
    """Pace of samples on a console."""

    def __init__(self, logging_steps: int) -> None:
        self._interval_s = INTERVAL_S if logging_steps == 1 else 0.0
        self._next_at = 0.0

    def is_due(self) -> bool:
        """Return whether samples are to be shown now."""
        now = time.monotonic()
        if now < self._next_at:
            return False
        self._next_at = now + self._interval_s
        return True


def sample_to_row(sample: TextSample) -> dict[str, Any]:
    return asdict(sample)


def sample_from_row(row: object) -> TextSample:
    """Raises ValueError if malformed."""
    return msgspec.convert(row, TextSample)
