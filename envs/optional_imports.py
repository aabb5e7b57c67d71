"""Libraries that only some envs need, imported when such an env is made."""

import importlib
from typing import Any


def require(module: str, extra: str, install_command: str = "") -> Any:
    """Import `module`; the error names the extra, or the command, that installs it.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = getattr(error, "name", None) or module
        command = install_command or f"uv pip install 'offbeat[{extra}]'"
        raise ValueError(f"{missing} is not installed: {command}") from error
