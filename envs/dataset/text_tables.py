"""Tables of .csv, .json and .jsonl files, whose texts stay as written.

Invariant: of the types that libraries infer, no timestamps are kept, and of a .csv file no numbers whose texts they lose.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

NULLS = (
    *(
        "",
        " ",
        "#N/A",
        "#N/A N/A",
        "#NA",
        "-1.#IND",
        "-1.#QNAN",
        "-NaN",
        "-nan",
        "1.#IND",
        "1.#QNAN",
        "<NA>",
        "N/A",
        "NA",
    ),
    *("NULL", "NaN", "None", "n/a", "nan", "null"),
)
"""Nulls of a column of numbers, as in pandas; of texts only empty cells."""
SPACE: Any = re.compile(r"\s*")
LEADING_ZERO = re.compile(r"[-+]?0\d")


def spellings(value: object) -> list[str]:
    """Return the texts of a row's value: a float also as `5` for 5.0 and `0.00001` for 1e-05."""
    return [str(value), np.format_float_positional(value, trim="-")] if isinstance(value, float) else [str(value)]


def read_csv(datasets: Any, files: Sequence[Path], exact: Collection[str]) -> Any:
    """Load .csv files; columns of numbers without leading zeros are numbers.

    exact: columns that are numbers only if each is written as Python writes it.
    """
    inferred = load_files(datasets, "csv", files).features
    string = datasets.Value("string")
    as_texts = datasets.Features(dict.fromkeys(inferred, string))
    texts = load_files(datasets, "csv", files, features=as_texts, keep_default_na=False, na_values=[""])
    numbers = [
        name
        for name, feature in inferred.items()
        if feature.dtype not in ("string", "large_string", "null") and _are_numbers(texts[name], name in exact)
    ]
    if not numbers:
        return texts
    # pandas reads no bools with nulls
    bools = [name for name in numbers if inferred[name].dtype == "bool" and any(_is_null(text) for text in texts[name])]
    kept = [name for name in numbers if name not in bools]
    features = datasets.Features({name: inferred[name] if name in kept else string for name in inferred})
    nulls = {name: list(NULLS) if name in numbers else [""] for name in inferred}
    table = load_files(datasets, "csv", files, features=features, keep_default_na=False, na_values=nulls)
    for name in bools:
        table = table.cast_column(name, inferred[name])
    return table


def _is_null(text: str | None) -> bool:
    return text is None or text in NULLS


def _are_numbers(texts: Iterable[str | None], exact: bool) -> bool:
    if not exact:
        return not any(LEADING_ZERO.match(text) for text in texts if text)
    return all(text in _written(text) for text in texts if text is not None)


def _written(text: str) -> list[str]:
    """Return how Python writes the number or bool of a text."""
    if text in ("True", "False"):
        return [text]
    try:
        return [str(int(text))]
    except ValueError:
        pass
    try:
        return spellings(float(text))
    except ValueError:
        return []


def read_json(datasets: Any, files: Sequence[Path]) -> Any:
    """Load .json or .jsonl files; dates and times are texts."""
    table = load_files(datasets, "json", files)
    features = {name: _without_timestamps(datasets, feature) for name, feature in table.features.items()}
    if features == dict(table.features):
        return table
    states = [path.stat() for path in files]
    stamps = tuple((state.st_mtime_ns, state.st_size) for state in states)
    source = {"files": tuple(map(str, files)), "stamps": stamps, "columns": tuple(features)}
    return datasets.Dataset.from_generator(_read_rows, gen_kwargs=source, features=datasets.Features(features))


def _without_timestamps(datasets: Any, feature: Any) -> Any:
    match feature:
        case datasets.Value() if feature.dtype.startswith(("timestamp", "date", "time")):
            return datasets.Value("string")
        case dict():
            fields = cast(dict[str, Any], feature)
            return {name: _without_timestamps(datasets, each) for name, each in fields.items()}
        case datasets.List():
            return datasets.List(_without_timestamps(datasets, feature.feature))
        case _:
            return feature


def _read_rows(files: tuple[str, ...], stamps: object, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the objects of files; `stamps` name their states in the library's cache."""
    del stamps
    for path in files:
        yield from ({name: row.get(name) for name in columns} for row in _read_objects(path))


def _read_objects(path: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, of a list or one after another."""
    decoder, text = json.JSONDecoder(), Path(path).read_text(encoding="utf-8-sig")
    end = SPACE.match(text).end()
    while end < len(text):
        value, end = decoder.raw_decode(text, end)
        end = SPACE.match(text, end).end()
        yield from cast(list[dict[str, Any]], value if isinstance(value, list) else [value])


def load_files(datasets: Any, reader: str, files: Sequence[Path], **settings: Any) -> Any:
    return datasets.load_dataset(reader, data_files=[str(path) for path in files], split="train", **settings)
