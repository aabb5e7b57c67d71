import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class InjectedFault:
    fault: str
    at_s: float
    step: int
    lasted_s: float = 0.0
    back_s: float | None = None
    """Recovery of the process or checkpoints, if applicable."""
    next_step_s: float | None = None
    """Until two more published steps."""
    missed: str = ""
    """Reason if not injected."""


@dataclass
class ChaosReport:
    seed: int
    injected: list[InjectedFault] = field(default_factory=list[InjectedFault])
    exit_code: int | None = None
    steps: int = 0
    wall_s: float = 0.0
    audit: dict[str, Any] = field(default_factory=dict[str, Any])
    leftovers: list[str] = field(default_factory=list[str])
    complaints: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    """Unsupported faults."""

    @property
    def passed(self) -> bool:
        return self.exit_code == 0 and bool(self.audit.get("proven")) and not self.leftovers and not self.complaints

    @property
    def done(self) -> list[InjectedFault]:
        return [fault for fault in self.injected if not fault.missed]

    def by_kind(self) -> dict[str, dict[str, Any]]:
        """Return count, median and longest recovery (s) by kind."""
        out: dict[str, dict[str, Any]] = {}
        for name in dict.fromkeys(fault.fault for fault in self.done):
            of_kind = [fault for fault in self.done if fault.fault == name]
            out[name] = {
                "count": len(of_kind),
                "back_s": _spread([fault.back_s for fault in of_kind]),
                "two_steps_s": _spread([fault.next_step_s for fault in of_kind]),
            }
        return out

    def as_tree(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed, "faults": len(self.done), "by_kind": self.by_kind()}


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"median": round(statistics.median(known), 2), "max": round(max(known), 2)} if known else None
