"""Outcomes of an imported configuration's keys."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from offbeat.trainer.config.issue import ConfigIssue

Status = Literal["same", "renamed", "value", "default", "no effect", "no counterpart"]
STATUSES: tuple[Status, ...] = ("same", "renamed", "value", "default", "no effect", "no counterpart")
MEANINGS: dict[Status, str] = {
    "same": "as they are, or what holds here anyway",
    "renamed": "other names",
    "value": "other values",
    "default": "the library's defaults that differ from Offbeat's",
    "no effect": "without effect, there or here",
    "no counterpart": "left out",
}
MAX_VALUE_CHARS = 60

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What a key becomes."""

    status: Status
    target: KeyPath | None = None
    """Key here, if any."""
    value: Any = None
    note: str = ""
    """Why, and what to do."""


@dataclass(frozen=True)
class KeyReport:
    """Outcome with its key, unless a default."""

    key: KeyPath
    outcome: Outcome

    def __str__(self) -> str:
        outcome, key = self.outcome, ".".join(self.key)
        target = "" if outcome.target is None else ".".join(outcome.target)
        shown = _shorten(outcome.value)
        text = {
            "same": key,
            "renamed": f"{key} -> {target}",
            "value": f"{key} -> {target}: {shown}" if target != key else f"{key}: {shown}",
            "default": f"{target}: {shown}",
        }.get(outcome.status, key)
        return f"{text} ({outcome.note})" if outcome.note else text


@dataclass(frozen=True)
class Imported:
    """An imported configuration."""

    source: Path
    tree: dict[str, Any]
    keys: tuple[KeyReport, ...]
    to_do: tuple[ConfigIssue, ...] = ()
    """Values to fill in."""
    remarks: tuple[str, ...] = field(default=())
    trial: tuple[str, ...] = field(default=())
    """What a trial replaces; empty for the run itself."""

    def of_status(self, status: Status) -> list[KeyReport]:
        return [each for each in self.keys if each.outcome.status == status]

    def with_to_do(self, issues: Sequence[ConfigIssue]) -> "Imported":
        return replace(self, to_do=tuple(issues))


def _shorten(value: Any) -> str:
    text = {True: "true", False: "false", None: "null"}.get(value) if not isinstance(value, list | dict) else None
    text = str(value) if text is None or (value in (0, 1) and not isinstance(value, bool)) else text
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."
