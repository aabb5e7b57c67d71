"""Lazy imports of optional libraries."""

import importlib
from typing import Any


def require(module: str, extra: str, install_command: str = "") -> Any:
    """Import `module`; the error names the extra or command that installs it.

    Raises:
        ValueError: not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = getattr(error, "name", None) or module
        command = install_command or f"uv pip install 'offbeat[{extra}]'"
        raise ValueError(f"{missing} is not installed: {command}") from error
