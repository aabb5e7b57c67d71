"""Libraries that only some envs need, imported when such an env is made."""

import importlib
from typing import Any


def require(module: str, extra: str) -> Any:
    """The module, or an error that names the extra which brings it.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = getattr(error, "name", None) or module
        raise ValueError(f"{missing} is not installed: uv pip install 'offbeat[{extra}]'") from error
