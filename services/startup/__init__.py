"""Folder on PYTHONPATH whose `sitecustomize` runs in child processes."""

import os
from collections.abc import Mapping
from pathlib import Path

FOLDER = str(Path(__file__).parent)
YOUNG_OBJECTS_VARIABLE = "OFFBEAT_YOUNG_OBJECTS"
"""Environment variable: objects that a process allocates between garbage collections."""


def make_pythonpath(environment: Mapping[str, str]) -> str:
    """Return the environment's PYTHONPATH with this folder first."""
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join((FOLDER, *(path for path in paths if path not in ("", FOLDER))))
