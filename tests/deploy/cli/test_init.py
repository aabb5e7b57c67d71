"""A project of one's own, from an empty folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.deploy.config.loader import load_run

pytestmark = pytest.mark.slow


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)


def offbeat(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "offbeat.deploy.cli.app", *arguments, folder=folder)


def test_a_project_passes_its_test_and_its_run_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = offbeat("init", "word_game", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    folder = tmp_path / "word_game"
    assert sorted(path.name for path in folder.iterdir()) == [
        ".gitignore", "README.md", "run.schema.json", "test_word_game.py", "word_game.py", "word_game.yaml",
    ]  # fmt: skip
    assert made.stdout.splitlines()[-2:] == ["  cd word_game", "  offbeat train word_game.yaml"]
    tested = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ".", folder=folder)
    assert "2 passed" in tested.stdout, tested.stdout
    validated = offbeat("config", "validate", "word_game.yaml", folder=folder)
    assert (validated.returncode, validated.stdout) == (0, "valid\n")
    monkeypatch.syspath_prepend(str(folder))
    assert (folder / load_run(folder / "word_game.yaml").output_dir) == folder / "runs/word_game"


def test_every_command_of_its_readme_exists(tmp_path: Path):
    assert offbeat("init", "word_game", folder=tmp_path).returncode == 0
    text = (tmp_path / "word_game/README.md").read_text()
    commands = {line.split()[1] for line in text.splitlines() if line.startswith("offbeat ")}
    assert commands == {"train", "play", "env"}
    shown = offbeat("play", "word_game:WordGame", "--agent", "random", folder=tmp_path / "word_game")
    assert shown.returncode == 0, shown.stderr


@pytest.mark.parametrize(("name", "message"), [("My-Game", "snake_case"), ("class", "snake_case"), ("taken", "exists")])
def test_a_name_that_is_taken_or_no_module_is_refused(name: str, message: str, tmp_path: Path):
    (tmp_path / "taken").mkdir()
    refused = offbeat("init", name, folder=tmp_path)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "taken"]
