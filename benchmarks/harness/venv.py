"""Venvs of compared programs; the marker is written last."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


class VenvError(Exception):
    """Failed installation, with its last output."""


@dataclass(frozen=True, slots=True)
class GuestVenv:
    name: str
    title: str
    pins: tuple[str, ...]

    @property
    def marker(self) -> str:
        """File with the pins."""
        return f"offbeat-{self.name}.txt"

    def default_folder(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "offbeat" / f"{self.name}-venv"

    def python_of(self, folder: Path) -> Path | None:
        """Return the interpreter if its pins match."""
        marker, python = folder / self.marker, folder / "bin" / "python"
        complete = marker.is_file() and marker.read_text(encoding="utf-8").split() == list(self.pins)
        return python if complete and python.exists() else None

    def ensure(self, folder: Path) -> Path:
        """Create a missing venv; return its interpreter.

        Raises:
            VenvError: a package can not be installed, or uv is missing.
        """
        python = self.python_of(folder)
        if python is not None:
            return python
        uv = self._uv()
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        environment = _environment()
        self._run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], environment)
        backend = [] if environment.get("UV_FIND_LINKS") else ["--torch-backend", "cpu"]
        install = [uv, "pip", "install", "--quiet", "--compile-bytecode", *backend, *self.pins]
        self._run(install, {**environment, "VIRTUAL_ENV": str(folder)})
        (folder / self.marker).write_text("\n".join(self.pins) + "\n", encoding="utf-8")
        return folder / "bin" / "python"

    def _uv(self) -> str:
        sibling = Path(sys.executable).with_name("uv")
        uv = str(sibling) if sibling.exists() else shutil.which("uv")
        if uv is None:
            raise VenvError(f"{self.title}'s venv is made with uv, which is not there: pip install uv")
        return uv

    def _run(self, command: list[str], environment: dict[str, str]) -> None:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            summary = " ".join(command[:4])
            raise VenvError(f"{self.title}'s venv can't be made: {summary} ...\n{done.stderr.strip()[-2000:]}")


def _environment() -> dict[str, str]:
    """Pass pip's wheels, registries and certificates to uv."""
    environment = dict(os.environ)
    for theirs, ours in (
        ("UV_FIND_LINKS", "PIP_FIND_LINKS"),
        ("UV_DEFAULT_INDEX", "PIP_INDEX_URL"),
        ("SSL_CERT_FILE", "PIP_CERT"),
    ):
        if not environment.get(theirs) and environment.get(ours):
            environment[theirs] = environment[ours]
    return environment
