"""Lazy imports of optional libraries."""

import importlib
from typing import Any


def require(module: str, extra: str, install_command: str = "") -> Any:
    """Import `module`; raises ValueError with the extra or command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = getattr(error, "name", None) or module
        command = install_command or f"uv pip install 'offbeat[{extra}]'"
        raise ValueError(f"{missing} is not installed: {command}") from error
