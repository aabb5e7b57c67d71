"""The page's JavaScript is typed, small, and in short files."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from offbeat.services.control.console.pages import FOLDER
from tests.browser.conftest import NODE

MAX_LINES, MAX_FILE_LINES = 1500, 300
TYPES = ("--noEmit", "--allowJs", "--checkJs", "--strict", "--target", "es2022", "--module", "es2022")
RESOLUTION = ("--moduleResolution", "bundler", "--lib", "es2023,dom,dom.iterable")


def scripts() -> list[Path]:
    return sorted((FOLDER / "js").glob("*.js"))


def test_the_scripts_stay_short() -> None:
    counts = {path.name: len(path.read_text().splitlines()) for path in scripts()}
    assert len(counts) >= 12
    assert max(counts.values()) <= MAX_FILE_LINES
    assert sum(counts.values()) <= MAX_LINES


def test_no_script_makes_markup_of_data() -> None:
    for path in scripts():
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert way not in path.read_text(), (path.name, way)


def test_every_module_is_loaded_at_once() -> None:
    """A module that the page's head does not name would wait for the one that imports it."""
    named = set(re.findall(r'(?:href|src)="js/([a-z]+\.js)"', (FOLDER / "index.html").read_text()))
    assert named == {path.name for path in scripts()}


@pytest.mark.slow
def test_the_scripts_are_typed() -> None:
    compiler, node = NODE / "typescript" / "bin" / "tsc", shutil.which("node")
    if node is None or not compiler.is_file():
        pytest.skip("no TypeScript: `make browser` installs it")
    command = [node, compiler, *TYPES, *RESOLUTION, FOLDER.resolve() / "js" / "app.js"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
