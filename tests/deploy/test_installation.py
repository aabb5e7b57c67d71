"""What `offbeat doctor` finds."""

import pytest
from typer.testing import CliRunner

from offbeat.deploy import installation
from offbeat.deploy.cli.app import app
from offbeat.deploy.installation import check_installation


def test_this_installation_has_no_problem():
    findings = list(check_installation())
    assert [finding for finding in findings if finding.state == "problem"] == []
    assert {"python", "torch", "vllm", "redis-server", "C++ compiler", "sandbox"} <= {each.subject for each in findings}
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0


def test_a_missing_library_is_a_problem_with_its_remedy(monkeypatch: pytest.MonkeyPatch):
    installed = installation._installed
    monkeypatch.setattr(installation, "_installed", lambda name: None if "vllm" in name else installed(name))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "problem vllm: not installed: pip install 'offbeat[cpu]'" in done.output


def test_a_torchvision_that_can_not_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(installation, "find_mismatched", lambda: {"torchvision": "torchvision 1 needs torch 2"})
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert "pip uninstall torchvision torchaudio torchcodec" in done.output
