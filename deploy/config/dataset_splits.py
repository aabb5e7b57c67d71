"""Data files of a dataset repository by config and split, which `datasets` finds by the names of files and the card.

Invariants: nothing of a repository is executed; no file or address outside of it is named.
"""

import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

from offbeat.envs.dataset.rows import READERS
from offbeat.envs.optional_imports import require

CARD = "README.md"
COMPRESSED = (".gz", ".bz2", ".xz")
UNOPENED = (".py", ".zip")
"""Suffixes of scripts, and of archives that `datasets` would open to find what is in them."""
CONFIG = re.compile(r"\w[^\s/@:]*")
EXPORTED = re.compile(r"(?P<config>[^/]+)/(?P<split>[^/]+)/\d{4}\.parquet")
"""Files of the revision `refs/convert/parquet`."""


class SplitError(ValueError):
    """Config, split or data files that a repository does not have."""


class Split(NamedTuple):
    config: str
    name: str
    files: tuple[str, ...]


def find_split(names: Sequence[str], card: Path | None, config: str | None, split: str | None, default: str) -> Split:
    """Return a split's files.

    names: all files of the repository. config: None for the default one; without such a config, a split of that.
    default: name of the split, if `split` is None.

    Raises:
        SplitError: no such config or split, or files that are not read.
    """
    names = [name for name in names if _is_inside(name)]
    exported = _find_exported(names)
    if exported and card is None:
        wanted = _choose(config, split, list(exported), next(iter(exported)) if len(exported) == 1 else None)
        splits = exported[wanted[0]]
    else:
        with _skeleton(names, card) as folder:
            wanted, splits = _find_by_library(folder, config, split)
    name = wanted[1] or default
    if name not in splits:
        has = ", ".join(splits)
        raise SplitError(
            f"config {wanted[0]} has no split {name!r}; there is {has}: write `:{wanted[0]}/SPLIT` after the id"
        )
    _check_readable(splits[name])
    return Split(wanted[0], name, tuple(splits[name]))


def reader_suffix(name: str) -> str:
    """Return a file's suffix without that of its compression."""
    path = PurePosixPath(name)
    return PurePosixPath(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _find_exported(names: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for name in sorted(names):
        if match := EXPORTED.fullmatch(name):
            found.setdefault(match["config"], {}).setdefault(match["split"], []).append(name)
    return found


def _choose(
    config: str | None, split: str | None, configs: Sequence[str], default: str | None
) -> tuple[str, str | None]:
    """Return config and split."""
    if config is not None and split is None and config not in configs and default is not None:
        config, split = None, config
    chosen = default if config is None else config
    if chosen is None or chosen not in configs:
        problem = "several configs" if config is None else f"no config {config!r}"
        raise SplitError(f"{problem}; there is {', '.join(configs)}: write `:CONFIG` or `:CONFIG/SPLIT` after the id")
    if not CONFIG.fullmatch(chosen):
        raise SplitError(f"config {chosen!r} can't be taken by its name: save the split to a file")
    return chosen, split


def _find_by_library(
    folder: Path, config: str | None, split: str | None
) -> tuple[tuple[str, str | None], dict[str, list[str]]]:
    """Return config and split, and the files of the config's splits."""
    from yaml import YAMLError

    datasets = require("datasets", "data")
    try:
        configs: list[str] = datasets.get_dataset_config_names(str(folder))
        default: str | None = datasets.get_dataset_default_config_name(str(folder))
        wanted = _choose(config, split, configs, default)
        builder = datasets.load_dataset_builder(str(folder), wanted[0], cache_dir=str(folder.parent / "cache"))
    except SplitError:
        raise
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError, YAMLError) as error:
        reason = " ".join(str(error).replace(str(folder), "the repository").split())
        raise SplitError(
            f"no data files are found ({reason}); scripts are not run: save the split to a file, or take the hub's "
            "conversion, `@refs/convert/parquet` after the id"
        ) from error
    found = cast(dict[Any, list[str]], builder.config.data_files or {})
    return wanted, {str(name): [_relative(file, folder) for file in files] for name, files in found.items()}


def _relative(file: str, folder: Path) -> str:
    try:
        return Path(file).relative_to(folder).as_posix()
    except ValueError as error:
        raise SplitError(f"its card names {file}, which is not in the repository") from error


@contextmanager
def _skeleton(names: Sequence[str], card: Path | None) -> Iterator[Path]:
    """Yield a folder with the card, and an empty file for each name."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve() / "repository"
        folder.mkdir()
        for name in names:
            if not name.endswith(UNOPENED):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()
        (folder / CARD).unlink(missing_ok=True)
        if card is not None and _has_metadata(card):
            shutil.copyfile(card, folder / CARD)
        yield folder


def _has_metadata(card: Path) -> bool:
    """Refuse patterns of files that are not in the repository, which the library would read or download."""
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    try:
        metadata = metadata_load(card) or {}
    except (YAMLError, ValueError) as error:
        raise SplitError(f"its card can't be read: {' '.join(str(error).split())}") from error
    for text in _texts(metadata.get("configs")):
        if ":" in text or not _is_inside(text):
            raise SplitError(f"its card names {text}, which is not in the repository")
    return bool(metadata)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        children = cast(dict[str, object], value).values() if isinstance(value, dict) else cast(list[object], value)
        for child in children:
            yield from _texts(child)


def _check_readable(files: Sequence[str]) -> None:
    suffixes = {reader_suffix(name) for name in files}
    if len(suffixes) > 1 or not suffixes <= READERS.keys():
        raise SplitError(
            f"its data files are {', '.join(sorted(suffixes))}, of which one of {', '.join(READERS)} is read: save the "
            "split to a file, or take the hub's conversion, `@refs/convert/parquet` after the id"
        )
