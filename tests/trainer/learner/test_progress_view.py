import io

from rich.console import Console

from offbeat.services.telemetry import Partial, mean
from offbeat.services.text_samples import TextSample
from offbeat.trainer.learner.progress_view import (
    LearnerLineView,
    LearnerTerminalView,
    describe_step,
    open_view,
)

STEP = {
    "reward": mean([0.25, 0.75]),
    "staleness": mean([1.0]),
    "tokens_per_busy_s": Partial("mean", 3000.0, 2.0),
    "time/wait_s": mean([0.25]),
}


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100, highlight=False), out


def test_a_line_of_a_step_has_the_figures_of_that_step():
    assert describe_step(STEP) == "reward 0.50  staleness 1.0  tokens/s 1,500  waited 0.2 s"


def test_a_line_of_a_data_pipelines_step_has_its_loss():
    step = {"loss": mean([0.5, 0.25]), "rewards/accuracies": mean([1.0, 0.0]), "time/train_s": mean([1.0])}
    assert describe_step(step) == "loss 0.3750  accuracy 0.50  trained 1.0 s"


def test_without_a_terminal_a_count_that_goes_up_is_no_new_line():
    where, out = console(False)
    view = LearnerLineView(where, 10)
    for text in ("warming up 10/300", "warming up 20/300", "training"):
        view.show_phase(text)
    assert out.getvalue().splitlines() == ["warming up 10/300", "training"]


def test_without_a_terminal_the_last_step_is_always_printed():
    where, out = console(False)
    view = LearnerLineView(where, 3)
    view.show_phase("training")
    for step in (1, 2, 3):
        view.show_step(step, STEP)
    assert out.getvalue().splitlines()[1:] == [f"step 3/3  {describe_step(STEP)}"]


def test_a_terminal_shows_one_transient_status_line():
    where, out = console(True)
    view = open_view(10, where)
    assert isinstance(view, LearnerTerminalView)
    view.show_phase("training")
    view.show_step(3, STEP)
    view.print("Goes on from step 2")
    view._live.refresh()
    shown = out.getvalue()
    assert "Goes on from step 2" in shown
    assert "training" in shown
    assert "3/10" in shown
    assert "reward 0.50" in shown
    view.close()
    assert out.getvalue().endswith("\x1b[2K")  # the line is erased


def test_elsewhere_than_in_a_terminal_lines_are_printed():
    assert isinstance(open_view(1, console(False)[0]), LearnerLineView)


SAMPLE = TextSample(2, 1, "Lake", 1.0, "\x1b[2J[bold]S[/]", ("Left",), ("Left",))


def test_a_row_and_samples_come_at_every_logged_step():
    where, out = console(False)
    view = open_view(7, where, logging_steps=3)
    for step in range(1, 8):
        view.show_step(step, STEP)
        view.show_samples((SAMPLE,) if step % 3 == 0 else ())
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["3/7", "6/7", "7/7"]
    assert [line for line in lines if "prompt" in line] == ["  prompt   \\x1b[2J[bold]S[/]"] * 2


def test_where_every_step_is_logged_samples_are_few():
    where, out = console(False)
    view = open_view(7, where)
    for _ in range(5):
        view.show_samples((SAMPLE,))
    assert out.getvalue().count("prompt") == 1


def test_a_terminal_escapes_samples_above_its_status_line():
    where, out = console(True)
    view = open_view(7, where, logging_steps=3)
    view.show_step(2, STEP)
    view.show_samples((SAMPLE,))
    view.close()
    assert "\\x1b[2J[bold]S[/]" in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()
