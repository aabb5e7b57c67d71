"""Escape sequences of a policy's and of envs' texts do not reach the terminal."""

import json
from pathlib import Path

import pytest

from offbeat.deploy.cli.runs.calls import print_message, show_answer
from offbeat.deploy.play.inspector import render_episodes
from offbeat.deploy.printable import show_controls
from offbeat.services.control.console.schemas import LagsView

EVIL = "turn 0: \x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b0m\thello\r\nworld é"
SHOWN = "turn 0: \\x1b]52;c;ZXZpbA==\\x07\\x1b[2J\\x9b0m\thello\\x0d\nworld é"


def test_controls_but_tabs_and_ends_of_lines_are_shown_by_their_codes():
    assert show_controls(EVIL) == SHOWN


def test_commands_print_no_control_of_a_recorded_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    show_answer(LagsView.model_construct(), as_json=False, otherwise=lambda: EVIL)
    print_message(EVIL)
    row = {"tag": "A", "seed": 1, "reward": 0.0, "metrics": {}, "text": [EVIL, EVIL]}
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations/step-1.jsonl").write_text(json.dumps(row) + "\n")
    lines = list(render_episodes(tmp_path, colour="mask", episode=None, limit=3))
    assert SHOWN in lines
    captured = capsys.readouterr()
    for text in (captured.out, captured.err, *lines):
        assert "\x1b]" not in text
        assert "\x1b[2J" not in text
    assert "\\x1b]52" in captured.out
    assert "\\x1b]52" in captured.err
