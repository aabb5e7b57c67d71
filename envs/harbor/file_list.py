"""A folder's entries as a sandbox lists them; untrusted, as its programs can replace `find` and write into its output."""

import base64
from typing import Literal, NamedTuple

SCRIPT = 'cd "$1" && find . -mindepth 1 \\( -type d -printf "d%p\\0" -o -type f -printf "f%p\\0" \\) | base64 -w 0'
"""Bash script that lists the folders and regular files of its first argument."""


class Entry(NamedTuple):
    kind: Literal["d", "f"]
    path: str
    """Relative to the folder, and below it."""


def read_entries(output: str) -> list[Entry]:
    """Parse the output of `SCRIPT`.

    Raises:
        ValueError: it was cut or changed, or an entry is not below the folder.
    """
    try:
        text = base64.b64decode(output.strip(), validate=True).decode(errors="surrogateescape")
    except ValueError as error:
        raise ValueError(f"the list of files is too long, or not that of `find`: {error}") from error
    return [_read_entry(line) for line in text.split("\0") if line]


def _read_entry(line: str) -> Entry:
    kind, path = line[:1], line[1:].removeprefix("./")
    if kind not in ("d", "f") or not path or path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"the list of files has {line!r}, which is not below the folder")
    return Entry(kind, path)
