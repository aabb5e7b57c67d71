"""torchvision and its kin, of another build than torch, are absent from our processes and from those that they start."""

import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.services import torch_extensions
from tests.paths import ROOT

BROKEN = 'raise RuntimeError("operator torchvision::nms does not exist")\n'
SHOW = "import importlib.util; print(importlib.util.find_spec('torchvision') is not None)"


def install(folder: Path, name: str, version: str, *requires: str) -> None:
    """Write a package that can't be imported, with its metadata."""
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
    metadata.write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(BROKEN)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Installed versions, as `find_mismatched` sees them."""
    versions: dict[str, str] = {}
    monkeypatch.setattr(torch_extensions, "_installed", versions.get)
    monkeypatch.setattr(torch_extensions, "requires", lambda _: ["numpy", "torch (==2.13.0)"])
    return versions


@pytest.mark.parametrize(
    ("torch", "torchvision", "fits"),
    [
        ("2.13.0+cpu", "0.28.0+cpu", True),
        ("2.13.0", "0.28.0", True),
        ("2.13.0+cu129", "0.28.0+cu129", True),
        ("2.13.0+git1a2b3c", "0.28.0+d4e5f6", True),
        ("2.13.0+cpu", "0.28.0", False),
        ("2.13.0", "0.28.0+cpu", False),
        ("2.13.0+cu129", "0.28.0+cu126", False),
        ("2.12.1+cpu", "0.28.0+cpu", False),
    ],
)
def test_builds_are_compared_by_their_versions(found: dict[str, str], torch: str, torchvision: str, fits: bool):
    found |= {"torch": torch, "torchvision": torchvision}
    reasons = torch_extensions.find_mismatched()
    assert (reasons == {}) is fits
    assert fits or (torch in reasons["torchvision"] and torchvision in reasons["torchvision"])


def test_nothing_is_mismatched_without_torch(found: dict[str, str]):
    found |= {"torchvision": "0.28.0"}
    assert torch_extensions.find_mismatched() == {}


def python(folder: Path, code: str) -> str:
    run = "import os, sys; sys.path[:0] = os.environ['FOLDERS'].split(':')\n" + code
    done = subprocess.run(
        [sys.executable, "-u", "-c", run],
        env={"PATH": "/usr/bin", "FOLDERS": f"{folder}:{ROOT / 'deploy/package'}", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_mismatched_package_is_absent_from_every_child_process(tmp_path: Path):
    """A program by `subprocess`, and one by `multiprocessing`, each before it imports anything of Offbeat."""
    install(tmp_path, "torch", "2.13.0+cpu")
    install(tmp_path, "torchvision", "0.28.0", "torch (==2.13.0)")
    (tmp_path / "child.py").write_text(f"{SHOW}\ndef show(): pass\n")
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys; subprocess.run([sys.executable, '-m', 'child'], check=True)"
    )
    assert python(tmp_path, SHOW) == "True\n"
    code = f"""
import offbeat, multiprocessing, subprocess
{SHOW}
subprocess.run([sys.executable, "-m", "child"], check=True)
subprocess.run([sys.executable, "-m", "parent"], check=True)
import child
process = multiprocessing.get_context("spawn").Process(target=child.show)
process.start()
process.join()
"""
    assert python(tmp_path, code) == "False\n" * 5


def test_a_shadowed_sitecustomize_still_runs(tmp_path: Path):
    install(tmp_path, "torch", "2.13.0+cpu")
    install(tmp_path, "torchvision", "0.28.0")
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    code = "import offbeat, subprocess\nsubprocess.run([sys.executable, '-c', 'print(2)'], check=True)"
    assert python(tmp_path, code) == "mine\nmine\n2\n"


def test_a_process_of_another_environment_keeps_its_packages(tmp_path: Path):
    install(tmp_path, "torch", "2.13.0+cpu")
    install(tmp_path, "torchvision", "0.28.0")
    child = f"import sys; {SHOW}"
    code = (
        "import offbeat, subprocess\n"
        "os.environ['OFFBEAT_HIDDEN_PACKAGES'] = 'torchvision@/other/venv'\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    assert python(tmp_path, code) == "True\n"


def test_a_matching_installation_leaves_the_environment_alone(tmp_path: Path):
    install(tmp_path, "torch", "2.13.0+cpu")
    install(tmp_path, "torchvision", "0.28.0+cpu", "torch (==2.13.0)")
    code = "before = dict(os.environ); import offbeat; print(before == dict(os.environ), 'torchvision' in sys.modules)"
    assert python(tmp_path, code) == "True False\n"
