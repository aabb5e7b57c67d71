"""A run folder that version 0.1 wrote (commit f037389, step 4 of 6) is backed up, restored and resumed by this build."""

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.integration.steering import OFFBEAT

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]

ARCHIVE = Path(__file__).with_name("data") / "run-0.1.tar.xz"
GROUPS_PER_STEP, STEPS = 2, 6


def offbeat(folder: Path, *arguments: object) -> str:
    environment, command = {**os.environ, "NO_COLOR": "1"}, [OFFBEAT, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_of_version_0_1_is_backed_up_restored_resumed_and_audited(tmp_path: Path) -> None:
    """Its configuration names classes by their old paths; its Redis, ledgers and checkpoints are of the old build."""
    original, folder = tmp_path / "run", tmp_path / "restored"
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(original, filter="data")
    offbeat(tmp_path, "backup", "run", "-o", "run.tar")
    shutil.rmtree(original)
    offbeat(tmp_path, "restore", "run.tar", "--to", folder)
    assert "PROVEN" in offbeat(tmp_path, "audit", folder)

    offbeat(tmp_path, "train", "restored/config.yaml", f"output_dir={folder}", "resume_from_checkpoint=true")

    report = json.loads((folder / "report.json").read_text())
    assert report["steps"] == STEPS
    assert report["attempts"] == 2
    assert report["groups_trained"] == STEPS * GROUPS_PER_STEP
    assert "PROVEN" in offbeat(tmp_path, "audit", folder)
