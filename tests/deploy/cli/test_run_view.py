import io

import pytest
from rich.console import Console

from offbeat.deploy.cli.run_view import (
    RunLineView,
    RunTerminalView,
    describe_state,
    eta_s,
    open_view,
    render,
    summary,
)
from offbeat.deploy.cli.runs.tables import run_table, runs_table
from offbeat.deploy.report.history import RunHistory
from offbeat.services.control.interfaces import Health
from offbeat.services.control.run import DesiredState, RunState
from offbeat.services.control.schemas import (
    ComponentView,
    CountersView,
    PathsView,
    RunsView,
    RunView,
    SettingsView,
)
from offbeat.services.telemetry import MetricRecord, Partial, mean
from offbeat.services.text_samples import TextSample


def view(
    state: RunState = RunState.RUNNING,
    learner: Health = Health.READY,
    phase: str = "training",
    detail: str = "",
    restarts: int = 0,
) -> RunView:
    counters = CountersView(
        admitted=30, submitted=20, trained=16, dropped={"stale": 2}, failed={"timeout": 1}, in_flight=11
    )
    return RunView(
        id="lake",
        state=state,
        wanted=DesiredState.RUNNING,
        phase=phase,
        error="",
        log="",
        resumable=True,
        step=2,
        version=2,
        max_steps=10,
        attempt=1,
        created_at=0.0,
        started_at=0.0,
        running_at=0.0,
        ended_at=0.0,
        components={"learner": ComponentView(health=learner, detail=detail, restarts=restarts)},
        counters=counters,
        settings=SettingsView(
            num_workers=1, num_replicas=1, learning_rate=1e-3, temperature=1.0, max_staleness=1.0, num_env_groups=8
        ),
        paths=PathsView(output_dir="", logs="", checkpoints="", tensorboard=""),
    )


def history() -> RunHistory:
    made = RunHistory()
    values = {
        "success": mean([0.5]),
        "reward": mean([0.4]),
        "staleness": mean([1.0]),
        "staleness_max": Partial("max", 1.0),
    }
    records = [
        MetricRecord("eval", {"success": mean([0.125])}, 0, {"when": "before", "sampling": "sampled"}, 1.0),
        MetricRecord("learner", values, 1, time=2.0),
        MetricRecord("learner", values, 2, time=4.0),
        MetricRecord("eval", {"success": mean([0.5])}, 2, {"when": "during", "sampling": "sampled"}, 5.0),
        MetricRecord("generation", {"weight_updates": Partial("sum", 3.0), "pause_s": mean([0.04])}, time=6.0),
    ]
    made.add((f"{i}-0", record) for i, record in enumerate(records))
    return made


def text_of(image: object) -> str:
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(image)
    return console.export_text()


def test_the_live_view_shows_what_matters():
    shown = text_of(render(view(restarts=1), history(), 65.0))
    for part in ("step 2/10", "1:05", "rollouts 0.50", "evaluation 0.50 (step 2)", "at first 0.12", "mean 1.00, max 1"):
        assert part in shown, part
    for part in ("16 trained", "dropped stale 2", "timeout 1", "restarted 1x", "pause 40 ms"):
        assert part in shown, part


def test_brackets_of_a_parts_message_are_no_markup():
    waits = view(state=RunState.STARTING, learner=Health.ABSENT, detail="no library in [/usr/lib, /opt/lib] [up]")
    output = io.StringIO()
    Console(file=output, width=120).print(render(waits, history(), 1.0))
    assert "no library in [/usr/lib, /opt/lib] [up]" in output.getvalue()


def test_a_plain_line_names_failed_groups():
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    with open_view("lake", console) as shown:
        shown.show(view(), history())
    assert "failed groups 1 (timeout 1)" in console.export_text()


def test_episodes_without_success_are_shown_beside_it_and_none_is_not_nan():
    labels = {"when": "during", "sampling": "sampled"}
    made = history()
    values = {"success": mean([0.25]), "success_missing": mean([0.0, 1.0]), "reward": mean([0.3])}
    made.add([("9-0", MetricRecord("eval", values, 3, labels, 7.0))])
    assert "evaluation 0.25 (step 3, 50% of episodes without one)" in summary(view(), made)["success"]
    rewards_only = RunHistory()
    step = MetricRecord("learner", {"reward": mean([0.4])}, 1, time=2.0)
    rewards_only.add([("1-0", MetricRecord("eval", {"reward": mean([0.3])}, 0, labels, 1.0)), ("2-0", step)])
    assert summary(view(), rewards_only) == {"reward": "0.40, evaluation 0.30 (step 0)"}


def test_the_time_left_follows_the_pace():
    assert eta_s(view(), history()) == 16.0
    assert eta_s(view(), RunHistory()) is None


def test_the_state_says_who_is_waited_for():
    assert describe_state(view()) == "training"
    assert (
        describe_state(view(RunState.STARTING, Health.STARTING, "warming up 3/300"))
        == "starting: learner (warming up 3/300)"
    )
    assert describe_state(view(RunState.DRAINING)) == "draining"
    assert describe_state(view(learner=Health.STARTING)) == "training, starting again: learner"


def test_a_run_without_records_has_an_empty_summary():
    assert summary(view(), RunHistory()) == {}


def test_a_pipe_gets_a_line_when_something_changes_and_not_at_each_poll():
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    with open_view("lake", console) as shown:
        assert isinstance(shown, RunLineView)
        shown.starting(["redis"])
        for _ in range(5):
            shown.show(view(RunState.STARTING, Health.STARTING, ""), RunHistory())
        for _ in range(5):
            shown.show(view(), history())
        shown.print("[not] markup")
    lines = console.export_text().splitlines()
    assert len(lines) == 3, lines
    assert "starting: learner" in lines[0]
    assert "step 2/10" in lines[1]
    assert lines[2] == "[not] markup"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_death_is_reported_once_with_its_cause(terminal: bool):
    file = io.StringIO()
    with open_view("lake", Console(file=file, width=200, force_terminal=terminal, highlight=False)) as shown:
        shown.show(view(), history())
        shown.show(view(learner=Health.DEAD, detail="killed by SIGKILL"), history())
        for _ in range(2):
            shown.show(view(learner=Health.STARTING, restarts=1), history())
        shown.show(view(restarts=2), history())
    deaths = [line for line in file.getvalue().splitlines() if "died" in line]
    assert [line[line.index("learner") :].strip() for line in deaths] == [
        "learner died: killed by SIGKILL; restart 1",
        "learner died; restart 2",
    ]


def test_a_terminal_gets_one_panel_that_goes_away():
    console = Console(force_terminal=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    with open_view("lake", console) as shown:
        assert isinstance(shown, RunTerminalView)
        shown.starting(["redis"])
        shown.show(view(), history())
        shown.close()
        shown.show(view(), history())


def with_step(number: int, samples: tuple[TextSample, ...] = ()) -> RunHistory:
    made = history()
    made.add([("9-0", MetricRecord("learner", {"reward": mean([0.5])}, number, {}, 9.0, samples))])
    return made


@pytest.mark.parametrize("terminal", [False, True])
def test_samples_of_a_logged_step_are_shown_once_and_escaped(terminal: bool):
    file = io.StringIO()
    console = Console(file=file, width=200, force_terminal=terminal, highlight=False)
    made = with_step(4, (TextSample(4, 3, "Lake", 1.0, "\x1b[2J[red]S[/]", ("Left",), ("Left",)),))
    with open_view("lake", console, logging_steps=2) as shown:
        shown.show(view(), made)
        shown.show(view(), made)
    assert file.getvalue().count("\\x1b[2J[red]S[/]") == 1
    assert "\x1b[2J" not in file.getvalue()


def test_plain_lines_come_every_logging_steps():
    file = io.StringIO()
    with open_view("lake", Console(file=file, width=300), logging_steps=3) as shown:
        for number in range(3, 11):
            shown.show(view(), with_step(number))
    assert [line.split("step ")[1].split("/")[0] for line in file.getvalue().splitlines()] == ["3", "6", "9"]


def test_a_data_pipeline_is_shown_by_its_losses():
    made = RunHistory()
    values = {"loss": mean([0.61234]), "rewards/accuracies": mean([0.75])}
    records = [
        MetricRecord("learner", values, 1, time=2.0),
        MetricRecord("eval", {"loss": mean([0.6501])}, 1, {"when": "during", "sampling": "loss"}, 3.0),
    ]
    made.add((f"{i}-0", record) for i, record in enumerate(records))
    assert summary(view(), made)["loss"] == "0.6123, accuracy 0.75, validation 0.6501 (step 1)"
    measured = view().model_copy(update={"metrics": {"loss": 0.61234, "rewards/accuracies": 0.75}})
    listed = text_of(runs_table(RunsView(runs=[measured, view()])))
    assert ("loss" in listed, "0.6123" in listed) == (True, True)
    assert "loss" not in text_of(runs_table(RunsView(runs=[view()])))
    assert "loss 0.6123, accuracy 0.75" in text_of(run_table(measured))
