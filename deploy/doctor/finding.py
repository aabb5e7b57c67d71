"""A line of `offbeat doctor`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class InstallationFinding:
    subject: str
    state: Literal["ok", "advice", "problem"]
    detail: str
    """What was found; with advice or a problem also what to do."""

    @classmethod
    def of(cls, subject: str, found: str, advice: str = "") -> "InstallationFinding":
        """Return `ok` without advice."""
        return cls(subject, "advice", f"{found}: {advice}") if advice else cls(subject, "ok", found)
