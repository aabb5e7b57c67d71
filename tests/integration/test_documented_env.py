"""The env of docs/environments.md, trained as it is printed."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.integration.mesh import HF_INFER
from tests.integration.steering import OFFBEAT
from tests.paths import ROOT

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]

MIN_SUCCESS = 0.6
"""Always answering the same word gives .33."""


def blocks() -> dict[str, str]:
    """The code blocks of "A custom env" by language."""
    text = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    section = text.split("## A custom env\n")[1].split("\n## ")[0]
    return dict(re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL))


def test_the_documented_env_is_learned(tmp_path: Path) -> None:
    code = blocks()
    (tmp_path / "my_envs.py").write_text(code["python"])
    (tmp_path / "my_run.yaml").write_text(code["yaml"])
    command = [OFFBEAT, "train", "my_run.yaml", HF_INFER]
    result = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "runs" / "own" / "report.json").read_text())
    assert report["success_before"] < 0.3
    assert report["success_after"] >= MIN_SUCCESS, result.stdout
    assert report["mismatch_kl"] < 0.1
