"""Progress of `offbeat train`."""

import math
import time
from collections.abc import Collection
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from offbeat.deploy.report.history import RunHistory, Step
from offbeat.services.control.failed_groups import describe_failed
from offbeat.services.control.interfaces import Health
from offbeat.services.control.run import RunState
from offbeat.services.control.schemas import RunView
from offbeat.services.telemetry import format_rate
from offbeat.services.text_samples import SampleClock, TextSample, describe_samples

LINE_EVERY_S = 10.0
NO_DIGITS = str.maketrans("", "", "0123456789")
START_ORDER = ("redis", "learner", "ray", "control")
MARKS = {
    Health.READY: "[green]ready[/]",
    Health.STARTING: "[yellow]starting[/]",
    Health.DEAD: "[red]dead[/]",
    Health.BROKEN: "[red]broken[/]",
    Health.DONE: "[green]done[/]",
    Health.ABSENT: "[dim]absent[/]",
}


class LiveView(Protocol):
    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def print(self, text: str) -> None: ...

    def starting(self, up: Collection[str]) -> None: ...

    def show(self, view: RunView, history: RunHistory) -> None: ...

    def close(self) -> None:
        """Stop the live display, not messages."""
        ...


def open_view(
    run_id: str, console: Console | None = None, *, began: float | None = None, logging_steps: int = 1
) -> LiveView:
    """Return a live view for terminals, else plain lines. began: Unix time."""
    console = console or Console(highlight=False)
    began = time.time() if began is None else began
    if console.is_terminal:
        return RunTerminalView(run_id, console, began, logging_steps)
    return RunLineView(console, began, logging_steps)


class _Samples:
    """Printer of each logged step's samples, once."""

    def __init__(self, logging_steps: int) -> None:
        self._clock = SampleClock(logging_steps)
        self._shown: tuple[TextSample, ...] = ()

    def describe_new(self, history: RunHistory) -> str:
        """Return samples to show now as text."""
        if history.samples is self._shown or not self._clock.is_due():
            return ""
        self._shown = history.samples
        return describe_samples(self._shown)


class _Deaths:
    """Reporter of each death of a part, once."""

    def __init__(self) -> None:
        self._restarts: dict[str, int] = {}
        self._causes: dict[str, str] = {}

    def describe_new(self, view: RunView) -> list[str]:
        lines: list[str] = []
        for name, part in view.components.items():
            if part.health is Health.DEAD:
                self._causes[name] = part.detail
            if part.restarts > self._restarts.get(name, 0):
                cause = self._causes.pop(name, "")
                lines.append(f"{name} died{f': {cause}' if cause else ''}; restart {part.restarts}")
            self._restarts[name] = part.restarts
        return lines


class RunLineView:
    def __init__(self, console: Console, began: float, logging_steps: int = 1) -> None:
        self._console = console
        self._deaths = _Deaths()
        self._every = logging_steps
        self._samples = _Samples(logging_steps)
        self._last_row = -1
        self._last_kind = ""
        self._last_at = -math.inf
        self._began = began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def starting(self, up: Collection[str]) -> None: ...

    def show(self, view: RunView, history: RunHistory) -> None:
        for line in self._deaths.describe_new(view):
            self.print(line)
        state = describe_state(view)
        now = time.monotonic()
        kind = state.translate(NO_DIGITS)  # that a count goes up is no change
        row = history.last_step.number // self._every if history.last_step else -1
        is_next = now >= self._last_at + LINE_EVERY_S if self._every == 1 or row < 0 else row != self._last_row
        if text := self._samples.describe_new(history):
            self.print(text)
        if kind == self._last_kind and not is_next:
            return
        self._last_kind, self._last_at, self._last_row = kind, now, row
        parts = [f"{time.time() - self._began:6.1f} s", state]
        if history.last_step is not None:
            parts += [f"step {history.last_step.number}/{view.max_steps}"]
            parts += [f"{name} {value}" for name, value in summary(view, history).items()]
        if view.counters is not None and view.counters.failed:
            parts.append(f"failed groups {describe_failed(view.counters.failed)}")
        self.print("  ".join(parts))

    def close(self) -> None: ...


class RunTerminalView:
    """Panel redrawn in place."""

    def __init__(self, run_id: str, console: Console, began: float, logging_steps: int = 1) -> None:
        self._samples = _Samples(logging_steps)
        self._deaths = _Deaths()
        self._run_id = run_id
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._began = began
        self._open = False

    def __enter__(self) -> Self:
        self._live.start()
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def starting(self, up: Collection[str]) -> None:
        if self._open:
            parts = [f"{part} {MARKS[Health.READY if part in up else Health.STARTING]}" for part in START_ORDER]
            elapsed = _format_time(time.time() - self._began)
            body = Text.from_markup("  ".join(parts) + f"   {elapsed}")
            title = f"[bold]{self._run_id}[/]  starting"
            self._live.update(Panel(body, title=title, title_align="left", padding=(0, 1)), refresh=True)

    def show(self, view: RunView, history: RunHistory) -> None:
        if self._open:
            for line in self._deaths.describe_new(view):
                self.print(line)
            if text := self._samples.describe_new(history):
                self.print(text)
            elapsed = time.time() - self._began
            self._live.update(render(view, history, elapsed), refresh=True)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._live.stop()


def render(view: RunView, history: RunHistory, elapsed_s: float) -> Panel:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()
    for name, value in summary(view, history).items():
        rows.add_row(name, escape(value))
    if view.counters is not None:
        counters = view.counters
        lost = {**{f"dropped {k}": n for k, n in counters.dropped.items()}, **counters.failed}
        more = "".join(f", {name} {number}" for name, number in lost.items())
        groups = f"{counters.admitted} admitted, {counters.trained} trained, {counters.in_flight} in flight{more}"
        rows.add_row("groups", escape(groups))
    rows.add_row("parts", Text.from_markup("  ".join(_parts(view))))
    title = f"[bold]{view.id}[/]  {escape(describe_state(view))}"
    return Panel(Group(_progress(view, history, elapsed_s), rows), title=title, title_align="left", padding=(0, 1))


def _progress(view: RunView, history: RunHistory, elapsed_s: float) -> Table:
    step = max(history.last_step.number if history.last_step else 0, 0)
    line = Table.grid(padding=(0, 1))
    left = eta_s(view, history)
    line.add_row(
        f"step {step}/{view.max_steps}",
        ProgressBar(total=view.max_steps, completed=step, width=36),
        f"{_format_time(elapsed_s)} elapsed"
        + (f", about {_format_time(left)} of training left" if left is not None else ""),
    )
    return line


def _parts(view: RunView) -> list[str]:
    parts: list[str] = []
    for name, part in view.components.items():
        restarts = f" [yellow](restarted {part.restarts}x)[/]" if part.restarts else ""
        parts.append(f"{name} {MARKS[part.health]}{restarts}")
    return parts


def describe_state(view: RunView) -> str:
    if view.state is RunState.RUNNING:
        phase = view.phase or "running"
        absent = [name for name, part in view.components.items() if part.health in (Health.DEAD, Health.STARTING)]
        return f"{phase}, starting again: {', '.join(absent)}" if absent else phase
    if view.state is RunState.STARTING:
        waits = [
            f"{name} {part.detail}" if part.health is Health.ABSENT and part.detail else name
            for name, part in view.components.items()
            if part.health is not Health.READY
        ]
        phase = f" ({view.phase})" if view.phase else ""
        return f"starting: {', '.join(waits)}{phase}" if waits else "starting"
    return view.state.value


def eta_s(view: RunView, history: RunHistory) -> float | None:
    pace, last = history.seconds_per_step(), history.last_step
    if pace is None or last is None or last.number >= view.max_steps:
        return None
    return pace * (view.max_steps - last.number)


def summary(view: RunView, history: RunHistory) -> dict[str, str]:
    out: dict[str, str] = {}
    last = history.last_step
    evaluations = [evaluation for evaluation in history.curve() if not math.isnan(evaluation.success)]
    success = _format_value(last, "success")
    shown = [f"rollouts {success}"] if success else []
    if evaluations:
        newest = evaluations[-1]
        missing = f", {newest.success_missing:.0%} of episodes without one" if newest.success_missing else ""
        shown.append(f"evaluation {newest.success:.2f} (step {newest.step}{missing})")
        if newest is not evaluations[0]:
            shown.append(f"at first {evaluations[0].success:.2f}")
    if shown:
        out["success"] = ", ".join(shown)
    if last is not None and not math.isnan(last.value("loss")):
        out["loss"] = _describe_loss(last, history)
    if last is not None:
        if reward := _format_value(last, "reward"):
            out["reward"] = reward + ("" if evaluations else _evaluated_reward(history))
        if staleness := _format_value(last, "staleness"):
            max_lag = last.value("staleness_max", 0.0)
            out["staleness"] = (
                f"mean {staleness}, max {max_lag:.0f} (bound {view.settings.to_settings().max_staleness:g})"
            )
    generated, trained = history.rate("generation/tokens"), history.rate("learner/tokens_trained")
    rates = {"generated": generated, "trained": trained}
    if shown_rates := [f"{format_rate(rate)} {name}" for name, rate in rates.items() if rate is not None]:
        out["tokens/s"] = ", ".join(shown_rates)
    if updates := history.total("generation/weight_updates"):
        pause = history.means.get("generation/pause_s")
        out["weight updates"] = f"{updates:.0f}" + (f", pause {1000 * pause.value:.0f} ms" if pause else "")
    return out


def _describe_loss(last: Step, history: RunHistory) -> str:
    """Return loss, accuracy of pairs, and the newest validation loss."""
    accuracy = _format_value(last, "rewards/accuracies")
    parts = [f"{last.value('loss'):.4f}", *([f"accuracy {accuracy}"] if accuracy else [])]
    if validated := history.curve("loss"):
        parts.append(f"validation {validated[-1].loss:.4f} (step {validated[-1].step})")
    return ", ".join(parts)


def _evaluated_reward(history: RunHistory) -> str:
    """Return the newest evaluation's reward."""
    newest = next(iter(history.curve()[-1:]), None)
    return (
        "" if newest is None or math.isnan(newest.reward) else f", evaluation {newest.reward:.2f} (step {newest.step})"
    )


def _format_value(step: Step | None, name: str) -> str:
    value = step.value(name) if step else math.nan
    return "" if math.isnan(value) else f"{value:.2f}"


def _format_time(seconds: float) -> str:
    total = int(seconds)
    return (
        f"{total // 3600}:{total // 60 % 60:02d}:{total % 60:02d}"
        if total >= 3600
        else f"{total // 60}:{total % 60:02d}"
    )
