"""Learner progress on the console."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from offbeat.services.telemetry import Partial, format_rate
from offbeat.services.text_samples import SampleClock, TextSample, describe_samples
from offbeat.trainer.trackers.base import LoggedSteps

LINE_INTERVAL_S = 10.0
"""Minimum interval, except for phase changes."""
NO_DIGITS = str.maketrans("", "", "0123456789")
SHOWN = {
    "loss": ("loss", "{:.4f}".format),
    "rewards/accuracies": ("accuracy", "{:.2f}".format),
    "reward": ("reward", "{:.2f}".format),
    "success": ("success", "{:.2f}".format),
    "staleness": ("staleness", "{:.1f}".format),
    "tokens_per_busy_s": ("tokens/s", format_rate),
    "time/wait_s": ("waited", "{:.1f} s".format),
    "time/train_s": ("trained", "{:.1f} s".format),
}
"""Metric -> label and format."""


class LearnerView(Protocol):
    """Progress display; `print` is signal-safe."""

    def print(self, text: str) -> None:
        """Print above the display."""
        ...

    def show_phase(self, text: str) -> None: ...

    def show_step(self, step: int, values: Mapping[str, Partial]) -> None:
        """Show a step's metrics."""
        ...

    def show_samples(self, samples: Sequence[TextSample]) -> None: ...

    def close(self) -> None:
        """Stop the display; `print` still works."""
        ...


class SilentView:
    def print(self, text: str) -> None: ...

    def show_phase(self, text: str) -> None: ...

    def show_step(self, step: int, values: Mapping[str, Partial]) -> None: ...

    def show_samples(self, samples: Sequence[TextSample]) -> None: ...

    def close(self) -> None: ...


class LearnerLineView:
    def __init__(self, console: Console, max_steps: int, logging_steps: int = 1) -> None:
        self._console = console
        self._max_steps = max_steps
        self._logged = LoggedSteps(logging_steps, max_steps)
        self._clock = SampleClock(logging_steps)
        self._phase = ""
        self._next_at = 0.0

    def print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def show_phase(self, text: str) -> None:
        changed = text.translate(NO_DIGITS) != self._phase.translate(NO_DIGITS)
        self._phase = text
        if changed or time.monotonic() >= self._next_at:
            self._line(text)

    def show_step(self, step: int, values: Mapping[str, Partial]) -> None:
        is_paced = self._logged.every == 1 and step != self._max_steps
        if step in self._logged and not (is_paced and time.monotonic() < self._next_at):
            self._line(f"step {step}/{self._max_steps}  {describe_step(values)}")

    def show_samples(self, samples: Sequence[TextSample]) -> None:
        if samples and self._clock.is_due():
            self.print(describe_samples(samples))

    def close(self) -> None: ...

    def _line(self, text: str) -> None:
        self._next_at = time.monotonic() + LINE_INTERVAL_S
        self.print(text)


class LearnerTerminalView:
    def __init__(self, console: Console, max_steps: int, logging_steps: int = 1) -> None:
        self._console = console
        self._max_steps = max_steps
        self._logged = LoggedSteps(logging_steps, max_steps)
        self._clock = SampleClock(logging_steps)
        self._phase, self._step, self._figures = "starting", 0, ""
        self._spinner = Spinner("dots")
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=5, transient=True)
        self._live.start()

    def print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def show_phase(self, text: str) -> None:
        self._phase = text

    def show_step(self, step: int, values: Mapping[str, Partial]) -> None:
        self._step = step
        if step in self._logged:
            self._figures = describe_step(values)

    def show_samples(self, samples: Sequence[TextSample]) -> None:
        if samples and self._clock.is_due():
            self.print(describe_samples(samples))

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Table:
        line = Table.grid(padding=(0, 1))
        for _ in range(5):
            line.add_column(no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(total=self._max_steps, completed=self._step, width=20)
        line.add_row(self._spinner, self._phase, bar, f"{self._step}/{self._max_steps}", self._figures)
        return line


def describe_step(values: Mapping[str, Partial]) -> str:
    shown = ((label, form(values[name].value)) for name, (label, form) in SHOWN.items() if name in values)
    return "  ".join(f"{label} {figure}" for label, figure in shown)


def open_view(max_steps: int, console: Console | None = None, *, logging_steps: int = 1) -> LearnerView:
    """Return a live view on terminals, else plain lines."""
    console = console or Console(highlight=False, file=sys.stdout)
    view = LearnerTerminalView if console.is_terminal else LearnerLineView
    return view(console, max_steps, logging_steps)
