"""Files with a generated secret.

Invariants: only the owner can read them; concurrent creators agree on the contents.
"""

import tempfile
from contextlib import suppress
from pathlib import Path


def create_secret_file(path: Path, text: str) -> None:
    """Write `text` unless there is a file, in a folder for its owner alone. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        return
    new = write_beside(path, text)
    with suppress(FileExistsError):  # another process was first
        path.hardlink_to(new)
    new.unlink()


def write_beside(path: Path, text: str) -> Path:
    """Write a file for its owner alone in the same folder."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        file.write(f"{text}\n")
    return Path(file.name)
