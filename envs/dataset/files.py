"""Rows of a dataset by their position in the file.

Invariant: a row's name is file and line.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

from offbeat.envs.dataset.rows import State, is_saved, list_files, read_state, read_table

Row = Mapping[str, Any]


class RowError(ValueError):
    """Unreadable row; names file and line."""


class DatasetRows(Protocol):
    columns: tuple[str, ...]
    folder: Path
    """Of files named in rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def scan(self, keys: Sequence[str]) -> Iterator[Row]:
        """Yield every row in one pass, with at least the existing `keys`."""
        ...

    def name(self, index: int) -> str: ...


class JsonLinesRows:
    """.jsonl files; only line positions are in memory."""

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        """path: the file, or the folder of `files`."""
        self._files = tuple(files)
        self.folder = path if path.is_dir() else path.parent
        self._file_of: list[int] = []
        self._starts: list[int] = []
        self._lines: list[int] = []
        for place, each in enumerate(self._files):
            position = 0
            with each.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        self._file_of.append(place)
                        self._starts.append(position)
                        self._lines.append(number)
                    position += len(line)
        if not self._starts:
            raise ValueError(f"{path} has no rows")
        self.columns = tuple(self[0])

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        with self._files[self._file_of[index]].open("rb") as file:
            file.seek(self._starts[index])
            return self._parse(index, file.readline())

    def scan(self, keys: Sequence[str]) -> Iterator[Row]:  # noqa: ARG002
        index = 0
        for each in self._files:
            with each.open("rb") as file:
                for line in (line for line in file if line.strip()):
                    yield self._parse(index, line)
                    index += 1

    def _parse(self, index: int, line: bytes) -> Row:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RowError(f"{self.name(index)}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise RowError(f"{self.name(index)}: expected an object, got {type(row).__name__}")
        return cast(dict[str, Any], row)

    def name(self, index: int) -> str:
        return f"{self._files[self._file_of[index]]}:{self._lines[index]}"


class TableRows:
    """A table of `datasets`, memory-mapped.

    Invariant: mappings in a row have no keys with None, as Arrow adds the keys of all others; a row has all columns.
    """

    def __init__(self, path: Path, exact: Collection[str] = ()) -> None:
        self._path = path
        self.folder = path if path.is_dir() else path.parent
        self._table = read_table(path, key="", exact=exact)
        self.columns = tuple(cast(list[str], self._table.column_names))
        if not len(self._table):
            raise ValueError(f"{path} has no rows")

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Row:
        return {key: _drop_nulls(value) for key, value in self._table[index].items()}

    def scan(self, keys: Sequence[str]) -> Iterator[Row]:
        columns = [key for key in keys if key in self.columns]
        return iter(self._table.select_columns(columns) if columns else ())

    def name(self, index: int) -> str:
        return f"{self._path} row {index + 1}"


def read_field(row: Row, key: str) -> Any:
    """Return a column, or for `column.field` what a column of mappings holds; None if there is no such value."""
    if key in row:
        return row[key]
    value: Any = row
    for name in key.split("."):
        value = cast(Row, value).get(name) if isinstance(value, Mapping) else None
    return value


def _drop_nulls(value: Any) -> Any:
    """Return a value whose mappings, at any depth, have no keys with None."""
    if isinstance(value, Mapping):
        return {key: _drop_nulls(each) for key, each in cast(Row, value).items() if each is not None}
    return [_drop_nulls(each) for each in cast(list[Any], value)] if isinstance(value, list) else value


def open_rows(path: Path, exact: tuple[str, ...] = ()) -> DatasetRows:
    """Open a dataset, once per state of its file; raises ValueError if unreadable or empty.

    exact: columns whose texts in a .csv file are compared with answers.
    """
    try:
        state = read_state(path)
    except OSError as error:
        raise ValueError(f"no such file: {path}") from error
    return _open(path, exact, state)


@lru_cache(maxsize=8)
def _open(path: Path, exact: tuple[str, ...], state: State) -> DatasetRows:
    del state
    if path.is_dir() and is_saved(path):
        return TableRows(path, exact)
    files = list_files(path) if path.is_dir() else [path]
    return JsonLinesRows(path, files) if files[0].suffix == ".jsonl" else TableRows(path, exact)
