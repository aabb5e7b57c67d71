import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from offbeat.deploy.cli.app import app
from offbeat.deploy.cli.env import parse_settings
from offbeat.deploy.config.loader import load_run
from tests.envs.harbor.task_folder import TaskFolder, needs_shell

pytestmark = pytest.mark.slow


def offbeat(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_list_shows_every_env_with_its_settings():
    out = " ".join(offbeat("env", "list").output.split())
    assert "frozen_lake" in out
    assert "num_boxes" in out


def test_check_reports_times_and_that_all_is_well():
    done = offbeat("env", "check", "sokoban", "num_boxes=2", "dim_room=[6, 7]")
    assert done.exit_code == 0, done.output
    assert "sokoban holds the contract" in done.output
    assert "execution: inline fits" in done.output


def test_tasks_that_need_a_container_are_listed_with_the_reason(tmp_path: Path):
    example = TaskFolder(tmp_path / "set/example")
    assert offbeat("env", "tasks", str(example.path)).output == "example: runs in a shell\n1 of 1 tasks run here\n"
    TaskFolder(tmp_path / "set/other").write("environment/Dockerfile", "FROM postgres\n")
    done = offbeat("env", "tasks", str(tmp_path))
    assert (done.exit_code, "other: needs a container: its Dockerfile: its image postgres" in done.output) == (1, True)
    assert offbeat("env", "tasks", str(tmp_path / "nowhere")).exit_code == 2


@needs_shell
def test_solutions_are_run_and_one_that_fails_is_reported(tmp_path: Path):
    example = TaskFolder(tmp_path / "example")
    example.write("solution/solve.sh", "echo 1 > answer\n")
    TaskFolder(tmp_path / "broken").write("solution/solve.sh", "exit 1\n")
    done = offbeat("env", "tasks", str(tmp_path), "--solve")
    assert done.exit_code == 1
    assert "example: the solution earns 1, doing nothing 0" in done.output
    assert "broken: reward.txt: could not convert" in done.output


def test_settings_are_read_as_in_a_configuration():
    settings = ["format_penalty=-1e-3", "size=4", "is_slippery=yes", "orders=[1, 2.5]", "env_config.date=2026-01-01"]
    expected = {"format_penalty": -0.001, "size": 4, "is_slippery": True, "orders": [1, 2.5], "date": "2026-01-01"}
    assert parse_settings(settings) == expected


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["sokobann"], 1, "did you mean sokoban?"),
        (["sokoban", "num_box=2"], 1, "did you mean env_config.num_boxes?"),
        (["sokoban", "num_boxes"], 2, "expected KEY=VALUE"),
        (["sokoban", "num_boxes=[1"], 2, "is no YAML"),
    ],
)
def test_a_wrong_name_or_setting_is_reported_without_a_traceback(arguments: list[str], code: int, says: str):
    done = offbeat("env", "check", *arguments)
    assert done.exit_code == code
    assert says in done.output
    assert "Traceback" not in done.output


def test_a_new_env_passes_its_own_test_and_its_run_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    done = offbeat("env", "new", "word_game")
    assert done.exit_code == 0, done.output
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    tested = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "2 passed" in tested.stdout
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_run(tmp_path / "word_game.yaml").custom_envs["WordGame"].env_type == "word_game:WordGame"


def test_new_writes_over_nothing_and_takes_no_name_that_python_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_mine.py").write_text("kept")
    taken = offbeat("env", "new", "mine")
    assert (taken.exit_code, "exists already" in taken.output) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]
    for name, reason in (
        ("My-Env", "snake_case"),
        ("class", "snake_case"),
        ("9lives", "snake_case"),
        ("queue", "of Python"),
    ):
        refused = offbeat("env", "new", name)
        assert (refused.exit_code, reason in refused.output) == (2, True)
