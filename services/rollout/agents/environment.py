"""Environment variables of agents' processes; imports only the standard library."""

import os
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

GATEWAY_HOST = "127.0.0.1"


def agent_environment(python: str) -> dict[str, str]:
    """Return the environment of Python agents.

    python: empty for this interpreter; others get this one's path without installed packages.
    """
    here = [os.getcwd(), *(path for path in sys.path if path)]
    if not python:
        return {**os.environ, **bypass_proxy(), "PYTHONPATH": os.pathsep.join(dict.fromkeys(here))}
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "VIRTUAL_ENV")}
    folder = os.path.dirname(os.path.abspath(shutil.which(python) or python))
    programs = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
    return {**kept, **bypass_proxy(), "PATH": programs, "PYTHONPATH": _without_installed(here)}


def command_environment() -> dict[str, str]:
    """Return the environment of commands, whose Python may be another one: `PYTHONPATH` without installed packages."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    # Anthropic's clients prefer the token to the key
    kept = {name: value for name, value in os.environ.items() if name != "ANTHROPIC_AUTH_TOKEN"}
    return {**kept, **bypass_proxy(), "PYTHONPATH": _without_installed(filter(None, paths))}


def bypass_proxy() -> dict[str, str]:
    """Return the variables that keep calls to the gateway from the proxy that `http_proxy` names."""
    lower, upper = os.environ.get("no_proxy"), os.environ.get("NO_PROXY")
    return {"no_proxy": _with_gateway(lower or upper), "NO_PROXY": _with_gateway(upper or lower)}


def _with_gateway(hosts: str | None) -> str:
    if hosts and "*" in hosts.split(","):
        return hosts
    return f"{hosts},{GATEWAY_HOST}" if hosts else GATEWAY_HOST


def _without_installed(paths: Iterable[str]) -> str:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [*map(sysconfig.get_path, names), *site.getsitepackages()]
    installed = [os.path.realpath(folder) for folder in folders]

    def is_own(path: str) -> bool:
        real = Path(os.path.realpath(path))
        return not any(real.is_relative_to(folder) for folder in installed) and not _holds_offbeat(path)

    return os.pathsep.join(dict.fromkeys(filter(is_own, paths)))


def _holds_offbeat(path: str) -> bool:
    return (Path(path) / "offbeat" / "__init__.py").is_file()
