"""A program in a pickle."""

import os
from pathlib import Path
from typing import Any


class Payload:
    """What makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)
