"""A run's folder is copied, the original deleted, and the copy resumed and audited."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.steering import OFFBEAT
from tests.integration.test_run import MY_ENVS, MY_RUN

pytestmark = pytest.mark.alone


def offbeat(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        [OFFBEAT, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_copied_folder_is_resumed_without_the_original(tmp_path: Path) -> None:
    (tmp_path / "my_envs.py").write_text(MY_ENVS)
    (tmp_path / "own.yaml").write_text(MY_RUN)
    original, copy = tmp_path / "runs" / "own", tmp_path / "restored" / "elsewhere"
    offbeat(tmp_path, "train", "own.yaml", "max_steps=3", "save_steps=2")
    shutil.copytree(original, copy, symlinks=True)
    shutil.rmtree(original)

    said = offbeat(tmp_path, "train", "restored/elsewhere/config.yaml", "max_steps=5", "resume_from_checkpoint=true")

    assert not original.exists()
    assert (copy / "checkpoints" / "step-000005" / "model.safetensors").is_file()
    assert "PROVEN" in offbeat(tmp_path, "audit", str(copy)), said
