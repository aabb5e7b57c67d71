"""A line of `offbeat doctor`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class InstallationFinding:
    subject: str
    state: Literal["ok", "advice", "problem"]
    detail: str
    """Fact, with advice for a problem."""

    @classmethod
    def of(cls, subject: str, found: str, advice: str = "") -> "InstallationFinding":
        """Return `ok` without advice."""
        return cls(subject, "advice", f"{found}: {advice}") if advice else cls(subject, "ok", found)
