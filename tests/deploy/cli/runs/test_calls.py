"""Answers of the control service in a terminal."""

import pytest

from offbeat.deploy.cli.runs.calls import DONE, show_answer
from offbeat.services.control.schemas import ProblemView


@pytest.mark.parametrize("text", ["KeyError: rewards[i]", "no end of '[/INST]'", "[red]a[/]", ":smile:"])
def test_a_text_is_printed_as_it_is(text: str, capsys: pytest.CaptureFixture[str]):
    answer = ProblemView(path="", message=text)
    assert show_answer(answer, as_json=False, otherwise=lambda: answer.message) == DONE
    assert capsys.readouterr().out == f"{text}\n"
