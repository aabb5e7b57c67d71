"""Hooks of the suite itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.slow

FAILS = r"""
import logging

def test_logs():
    logging.error("logged \ud800")
    assert "compared \ud801" == "told \ud802"

def test_runs_in_the_same_worker():
    pass
"""


def test_a_failure_with_lone_surrogates_ends_no_worker(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_report_to_serializable\n")
    (tmp_path / "test_surrogates.py").write_text(FAILS)
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert all(text in done.stdout for text in (r"logged \ud800", r"compared \ud801", r"told \ud802"))
