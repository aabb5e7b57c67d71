"""Rows of a jsonl, json, csv or parquet file, a folder of such files in the order of their names, or a `datasets` folder.

Invariant: no downloads; rows are memory-mapped once per process and state of their file.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from offbeat.envs.dataset.text_tables import load_files, read_csv, read_json
from offbeat.envs.optional_imports import require

READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")
"""Files of a folder that `datasets` saved."""
HELD_OUT_SHARE = 8
"""Inverse share of questions held out, by digest, without a validation file."""

Row = Mapping[str, Any]
State = tuple[tuple[int, int], ...]


class Rows:
    def __init__(self, path: Path, table: Any, indices: tuple[int, ...] | None = None) -> None:
        self._path = path
        self._table = table
        self._indices = indices

    def __len__(self) -> int:
        return len(self._table) if self._indices is None else len(self._indices)

    def __getitem__(self, index: int) -> Row:
        return self._table[self._row(index)]

    def row_id(self, index: int) -> str:
        return f"{self._path}:{self._row(index)}"

    def _row(self, index: int) -> int:
        return index if self._indices is None else self._indices[index]


def read_state(path: Path) -> State:
    """Return times and sizes of a file, or of a folder's files; raises OSError."""
    states = (each.stat() for each in (sorted(path.iterdir()) if path.is_dir() else [path]))
    return tuple((state.st_mtime_ns, state.st_size) for state in states)


def load_rows(path: Path, question_key: str, answer_key: str, split: str) -> Rows:
    """Load a split: `train`, `held_out` or `any`, once per state of its file; raises ValueError for an unreadable file,
    missing column, row without question or answer, or no rows."""
    try:
        state = read_state(path)
    except OSError:
        state = None
    return _load_rows(path, question_key, answer_key, split, state)


@lru_cache(maxsize=8)
def _load_rows(path: Path, question_key: str, answer_key: str, split: str, state: State | None) -> Rows:
    del state
    table = read_table(path, exact=(question_key, answer_key))
    for key, column in (("question_key", question_key), ("answer_key", answer_key)):
        if column not in table.column_names:
            raise ValueError(f"{key}: {path} has no column {column!r}; it has {', '.join(table.column_names)}")
        if (missing := _first_null(table, column)) is not None:
            raise ValueError(f"{path} row {missing + 1}: {column!r} is missing: add it or remove the row")
    if split == "any":
        return Rows(path, table)
    is_held_out = split == "held_out"
    indices = tuple(i for i, text in enumerate(table[question_key]) if _is_held_out(str(text)) == is_held_out)
    if not indices:
        raise ValueError(f"no row of {path} is in split {split!r}: set val_dataset_name or add rows")
    return Rows(path, table, indices)


def _first_null(table: Any, column: str) -> int | None:
    if not table.data.column(column).null_count:  # Arrow's count, which converts no value
        return None
    return next((i for i, value in enumerate(table[column]) if value is None), None)


def read_table(path: Path, key: str = "dataset_name", exact: Collection[str] = ()) -> Any:
    """Load a `datasets.Dataset`, with images as stored; raises ValueError if unreadable.

    key: of the setting, for errors; empty if callers name it. exact: columns whose texts in a .csv file are compared with
    answers.
    """
    datasets = require("datasets", "data")
    table = _load_table(datasets, path, key, exact)
    _leave_images_encoded(datasets, table.info.features)
    return table


def _leave_images_encoded(datasets: Any, feature: Any) -> None:
    """Turn off the decoding of images at any depth, which would read any path and download URLs."""
    match feature:
        case datasets.Image():
            feature.decode = False
        case dict():
            for each in cast(dict[str, Any], feature).values():
                _leave_images_encoded(datasets, each)
        case list():
            _leave_images_encoded(datasets, feature[0])
        case _:
            if (each := getattr(feature, "feature", None)) is not None:
                _leave_images_encoded(datasets, each)


def _load_table(datasets: Any, path: Path, key: str, exact: Collection[str]) -> Any:
    if path.is_dir() and not is_saved(path):
        return _load_files(datasets, list_files(path, key), path, exact)
    if path.is_dir():
        try:
            dataset = datasets.load_from_disk(str(path))
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(f"{path} is not a folder saved by datasets: {error}") from error
        if hasattr(dataset, "keys"):
            raise ValueError(
                f"{path} holds the splits {', '.join(dataset)}: name one, such as {path / next(iter(dataset))}"
            )
        return dataset
    if not path.is_file():
        raise ValueError(f"{_named(key)}no such file: {path}")
    if path.suffix not in READERS:
        raise ValueError(f"{_named(key)}{path.name} is none of {', '.join(READERS)}, nor a folder saved by datasets")
    return _load_files(datasets, [path], path, exact)


def is_saved(folder: Path) -> bool:
    """Return whether `datasets` saved a folder."""
    return any((folder / name).exists() for name in SAVED)


def list_files(folder: Path, key: str = "") -> list[Path]:
    """Return a folder's files of rows, by name; raises ValueError unless they are of one kind and there.

    key: as in `read_table`.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in READERS)
    if len(kinds := {path.suffix for path in files}) != 1:
        has = f"has files of {', '.join(sorted(kinds))}" if kinds else f"has no {', '.join(READERS)} files"
        raise ValueError(
            f"{_named(key)}{folder} is not a folder saved by datasets, and {has}: it needs files of one kind"
        )
    if missing := next((path for path in files if not path.is_file()), None):
        raise ValueError(f"{_named(key)}no such file: {missing}")
    return files


def _named(key: str) -> str:
    return f"{key}: " if key else ""


def _load_files(datasets: Any, files: Sequence[Path], path: Path, exact: Collection[str]) -> Any:
    """path: the file, or their folder."""
    reader = READERS[files[0].suffix]
    datasets.disable_progress_bars()
    try:
        if reader == "csv":
            return read_csv(datasets, files, exact)
        if reader == "json":
            return read_json(datasets, files)
        return load_files(datasets, reader, files)
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {' '.join(str(error.__cause__ or error).split())}") from error


def _is_held_out(text: str) -> bool:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") % HELD_OUT_SHARE == 0
