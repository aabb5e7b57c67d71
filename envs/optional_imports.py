"""Libraries that only some envs need, imported when such an env is made."""

import importlib
from typing import Any


def require(module: str, extra: str, how: str = "") -> Any:
    """Return the module, or an error that names the extra which brings it.

    how: the command that installs it, where no extra can.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = getattr(error, "name", None) or module
        told = how or f"uv pip install 'offbeat[{extra}]'"
        raise ValueError(f"{missing} is not installed: {told}") from error
