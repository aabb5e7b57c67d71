"""TRL's venv: made once, with pinned versions, apart from ours, because TRL and vLLM rarely agree on theirs.

Invariant: a venv that is found is whole: the marker with its pins is written last.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from deploy.bench.peer.options import PeerError

PINS = (
    "trl==1.16.0",
    "torch==2.13.0",
    "transformers==5.19.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "gymnasium==1.4.0",
    "numpy==2.4.6",
    "pydantic==2.14.3",
)
MARKER = "offbeat-peer.txt"


class VenvError(PeerError):
    """The venv can't be made; the message holds what the installer said last."""


def default_folder() -> Path:
    """Where the venv lies unless told otherwise: the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offbeat" / "peer-venv"


def python_of(folder: Path) -> Path | None:
    """The interpreter of a venv with these pins, or None where there is none."""
    marker, python = folder / MARKER, folder / "bin" / "python"
    whole = marker.is_file() and marker.read_text(encoding="utf-8").split() == list(PINS)
    return python if whole and python.exists() else None


def ensure_venv(folder: Path) -> Path:
    """Make the venv where it is not; takes minutes. Returns its interpreter.

    Raises:
        VenvError: a package can't be had, or there is no uv.
    """
    python = python_of(folder)
    if python is not None:
        return python
    uv = _uv()
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    environment = _environment()
    _run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], environment)
    backend = [] if environment.get("UV_FIND_LINKS") else ["--torch-backend", "cpu"]
    install = [uv, "pip", "install", "--quiet", "--compile-bytecode", *backend, *PINS]
    _run(install, {**environment, "VIRTUAL_ENV": str(folder)})
    (folder / MARKER).write_text("\n".join(PINS) + "\n", encoding="utf-8")
    return folder / "bin" / "python"


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise VenvError("TRL's venv is made with uv, which is not there: pip install uv")
    return found


def _environment() -> dict[str, str]:
    """What pip was told about wheels, registries and certificates holds for uv too."""
    environment = dict(os.environ)
    for theirs, ours in (
        ("UV_FIND_LINKS", "PIP_FIND_LINKS"),
        ("UV_DEFAULT_INDEX", "PIP_INDEX_URL"),
        ("SSL_CERT_FILE", "PIP_CERT"),
    ):
        if not environment.get(theirs) and environment.get(ours):
            environment[theirs] = environment[ours]
    return environment


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise VenvError(f"TRL's venv can't be made: {' '.join(command[:4])} ...\n{done.stderr.strip()[-2000:]}")
