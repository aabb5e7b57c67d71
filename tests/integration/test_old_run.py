"""A run folder that version 0.1 wrote (commit f037389, stopped at step 4 of 6) is resumed by this build."""

import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.integration.steering import OFFBEAT

pytestmark = pytest.mark.alone

ARCHIVE = Path(__file__).with_name("data") / "run-0.1.tar.xz"
GROUPS_PER_STEP, STEPS = 2, 6


def test_a_run_of_version_0_1_is_resumed_and_audited(tmp_path: Path) -> None:
    """Its configuration names classes by their old paths; its Redis, ledgers and checkpoints are of the old build."""
    folder = tmp_path / "run"
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    environment = {**os.environ, "NO_COLOR": "1"}

    command = [OFFBEAT, "train", "run/config.yaml", f"output_dir={folder}", "resume_from_checkpoint=true"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

    report = json.loads((folder / "report.json").read_text())
    assert report["steps"] == STEPS
    assert report["attempts"] == 2
    assert report["groups_trained"] == STEPS * GROUPS_PER_STEP
    audit = subprocess.run(
        [OFFBEAT, "audit", str(folder)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr
