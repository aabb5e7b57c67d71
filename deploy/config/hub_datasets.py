"""Datasets of the Hugging Face hub: `ORGANIZATION/NAME[:CONFIG/SPLIT][@REVISION]` becomes a file, or a folder of files.

Invariants: as in `hub`; a path names commit, config and split, and its files are those of the hub's cache, in the order of
the split.
"""

import copy
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple, cast

from offbeat.deploy.config.checks.data import DATA_KEYS
from offbeat.deploy.config.dataset_splits import CARD, COMPRESSED, CONFIG, Split, SplitError, find_split, reader_suffix
from offbeat.deploy.config.hub import SERVER_ERROR, TIMEOUT_S, HubError, Kind, hub_errors, is_online
from offbeat.envs.dataset.rows import READERS
from offbeat.envs.registry import BUILT_IN
from offbeat.trainer.config.aliases import find_keys
from offbeat.trainer.config.issue import ConfigIssue

NAME = r"[A-Za-z0-9][\w.-]*"
DATASET_ID = re.compile(
    rf"(?P<id>{NAME}/{NAME})(?::(?P<config>{CONFIG.pattern})(?:/(?P<split>\w[\w.]*))?)?(?:@(?P<revision>[\w./-]+))?"
)
DATASET = "dataset"
KIND = Kind(DATASET, "file or folder", "name a local file", "hf download --repo-type dataset")
DEFAULT_SPLITS = {"dataset_name": "train", "val_dataset_name": "test"}
"""Key -> split of an id without one, as in TRL."""
COMMIT = re.compile(r"[0-9a-f]{40}")
LIBRARY, PREFIX = "offbeat", "datasets--"
FILES = "files.json"
"""Names of a repository's files at a commit."""


class DatasetId(NamedTuple):
    """Parts of an id. config: or split, if that is None."""

    repo: str
    config: str | None
    split: str | None
    revision: str | None


class DatasetSnapshot(NamedTuple):
    commit: str
    files: list[str]
    card: Path | None


def is_dataset_id(name: str, folder: Path = Path()) -> bool:
    """Return whether `name` may be a hub dataset rather than a file or folder in `folder`."""
    is_file = Path(name).suffix in (*READERS, *COMPRESSED)
    return DATASET_ID.fullmatch(name) is not None and not is_file and not (folder / name).exists()


def resolve_datasets(
    tree: dict[str, Any], resolve: Callable[[str, str], str]
) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Return a canonical tree with hub ids replaced by `resolve` (`download` or `find`), and an issue per failure."""
    resolved = copy.deepcopy(tree)
    found: dict[tuple[str, str], str] = {}
    issues: list[ConfigIssue] = []
    for path, table, name in _hub_datasets(resolved):
        wanted = name, DEFAULT_SPLITS[path[-1]]
        try:
            found[wanted] = found.get(wanted) or resolve(*wanted)
        except HubError as error:
            issues.append(ConfigIssue(".".join(path), str(error)))
        else:
            table[path[-1]] = found[wanted]
    return resolved, issues


def missing_datasets(tree: dict[str, Any]) -> list[str]:
    """Return the hub ids in a canonical tree."""
    return list(dict.fromkeys(name for _, _, name in _hub_datasets(tree)))


def _hub_datasets(tree: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any], str]]:
    """Yield paths and tables of ids, and of links whose files the cache has lost, each with the id."""
    for path, table in _datasets(tree):
        name = table[path[-1]]
        if not isinstance(name, str):
            continue
        if wanted := name if is_dataset_id(name) else _find_lost(Path(name)):
            yield path, table, wanted


def _find_lost(path: Path) -> str | None:
    """Return the id of what `_link` has made, if its files were removed from the cache since."""
    from huggingface_hub import constants

    root = Path(constants.HF_ASSETS_CACHE) / LIBRARY
    if not path.is_relative_to(root) or len(parts := path.relative_to(root).parts) != 4:
        return None
    links = [path] if path.suffix in READERS else [*path.glob("*")]
    if links and all(link.is_file() for link in links):
        return None
    repository, commit, config, split = parts
    repo = repository.removeprefix(PREFIX).replace("--", "/")
    return f"{repo}:{config}/{split.removesuffix(path.suffix) if path.suffix in READERS else split}@{commit}"


def _datasets(tree: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    for pattern in DATA_KEYS:
        yield from find_keys(tree, pattern)
    for path, table in find_keys(tree, "custom_envs.*.env_config"):
        yield from _env_datasets(table, path[:-1])


def _env_datasets(env: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield the datasets of a built-in env, also of one within `tools`; in other envs a name may be anything."""
    settings = env.get("env_config")
    if str(env.get("env_type")) not in BUILT_IN or not isinstance(settings, dict):
        return
    table = cast(dict[str, Any], settings)
    yield from (((*path, "env_config", key), table) for key in DEFAULT_SPLITS if key in table)
    yield from _env_datasets(table, (*path, "env_config"))


def download(name: str, default_split: str) -> str:
    """Return the path of a split's rows, from the cache if the hub is unreachable.

    Raises:
        HubError: no such dataset, revision, config or split, no access, or no connection.
    """
    wanted = _parse(name)
    with _errors(name, wanted):
        is_local = not is_online()
        snapshot = _open(wanted, local=is_local)
        split = _choose(snapshot, wanted, default_split)
        path = _link(wanted, snapshot.commit, split)
        if path is None and not is_local:
            _download(wanted.repo, snapshot.commit, split)
            path = _link(wanted, snapshot.commit, split)
        if path is None:
            raise _incomplete(wanted)
        return path


def find(name: str, default_split: str) -> str:
    """Return, within seconds, the path of a split's rows, or `ID:CONFIG/SPLIT@COMMIT` of one to download.

    Raises:
        HubError: as `download`.
    """
    wanted = _parse(name)
    with _errors(name, wanted):
        is_local = not is_online()
        snapshot = _open(wanted, local=is_local)
        split = _choose(snapshot, wanted, default_split)
        path = _link(wanted, snapshot.commit, split)
        if path is None and is_local:
            raise _incomplete(wanted)
        if path is None:
            _check_access(wanted.repo, snapshot.commit, split)
        return path or f"{wanted.repo}:{split.config}/{split.name}@{snapshot.commit}"


def _parse(name: str) -> DatasetId:
    match = DATASET_ID.fullmatch(name)
    assert match is not None, "is_dataset_id"
    return DatasetId(match["id"], match["config"], match["split"], match["revision"])


@contextmanager
def _errors(name: str, wanted: DatasetId) -> Iterator[None]:
    with hub_errors(name, wanted.repo, wanted.revision, KIND):
        try:
            yield
        except SplitError as error:
            raise HubError(f"{wanted.repo}: {error}") from error


def _incomplete(wanted: DatasetId) -> HubError:
    return HubError(
        f"the {DATASET} hub can't be reached, and its cache has not all files of {wanted.repo}: fill it where there is a "
        f"connection (`{KIND.command} {wanted.repo}`)"
    )


def _choose(snapshot: DatasetSnapshot, wanted: DatasetId, default_split: str) -> Split:
    return find_split(snapshot.files, snapshot.card, wanted.config, wanted.split, default_split)


def _open(wanted: DatasetId, *, local: bool) -> DatasetSnapshot:
    """Return a commit's files and card, of the cache if the hub fails."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] -- of its HTTP client
    )

    repo = wanted.repo
    if local:
        return _open_cached(wanted)
    try:
        info = HfApi().dataset_info(repo, revision=wanted.revision, timeout=TIMEOUT_S)
    except HTTPError as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code < SERVER_ERROR:
            raise
        return _open_cached(wanted)
    commit, files = str(info.sha), [each.rfilename for each in info.siblings or ()]
    card = None
    if CARD in files:
        card = Path(hf_hub_download(repo, CARD, repo_type=DATASET, revision=commit, etag_timeout=TIMEOUT_S))
    _replace(_folder(repo, commit) / FILES, lambda path: path.write_text(json.dumps(files)))
    _write_ref(wanted, commit)
    return DatasetSnapshot(commit, files, card)


def _open_cached(wanted: DatasetId) -> DatasetSnapshot:
    from huggingface_hub.errors import LocalEntryNotFoundError

    cached = _cache(wanted.repo)
    revision = wanted.revision or "main"
    ref = cached / "refs" / revision
    commit = revision if COMMIT.fullmatch(revision) else ref.read_text().strip() if ref.is_file() else None
    folder = cached / "snapshots" / str(commit)
    listing = _folder(wanted.repo, str(commit)) / FILES
    present = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    files: list[str] = json.loads(listing.read_text()) if listing.is_file() else present
    if commit is None or not present or (CARD in files and CARD not in present):
        raise LocalEntryNotFoundError(f"no snapshot of {wanted.repo}")
    return DatasetSnapshot(commit, files, folder / CARD if CARD in present else None)


def _write_ref(wanted: DatasetId, commit: str) -> None:
    """Note the commit of a branch or tag in the hub's cache, as its library does."""
    revision = wanted.revision or "main"
    if not COMMIT.fullmatch(revision):
        _replace(_cache(wanted.repo) / "refs" / revision, lambda path: path.write_text(commit))


def _cache(repo: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"{PREFIX}{repo.replace('/', '--')}"


def _folder(repo: str, commit: str) -> Path:
    """Return the folder of a commit's splits."""
    from huggingface_hub import constants

    return Path(constants.HF_ASSETS_CACHE) / LIBRARY / f"{PREFIX}{repo.replace('/', '--')}" / commit


def _check_access(repo: str, commit: str, split: Split) -> None:
    """Ask for a file, as the terms of a repository may hide its files alone."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    get_hf_file_metadata(hf_hub_url(repo, split.files[0], repo_type=DATASET, revision=commit), timeout=TIMEOUT_S)


def _download(repo: str, commit: str, split: Split) -> None:
    from huggingface_hub import snapshot_download

    patterns = [escape(name) for name in split.files]
    snapshot_download(repo, repo_type=DATASET, revision=commit, allow_patterns=patterns)


def _link(wanted: DatasetId, commit: str, split: Split) -> str | None:
    """Return the split's file, or a folder of its files; None unless the cache has them."""
    sources = [_cache(wanted.repo) / "snapshots" / commit / name for name in split.files]
    if not all(source.is_file() for source in sources):
        return None
    folder = _folder(wanted.repo, commit) / split.config
    suffix = reader_suffix(split.files[0])
    if len(sources) == 1:
        path = folder / f"{split.name}{suffix}"
        if not path.is_file():
            _replace(path, lambda link: _link_or_unpack(sources[0], link, suffix))
        return str(path)
    path = folder / split.name
    for number, source in enumerate(sources):
        link = path / f"{number:05d}{suffix}"
        if not link.is_file():
            _replace(link, lambda link, source=source: _link_or_unpack(source, link, suffix))
    return str(path)


def _link_or_unpack(source: Path, link: Path, suffix: str) -> None:
    if source.suffix == suffix:
        link.symlink_to(source)
        return
    import fsspec

    with fsspec.open(source, compression="infer") as packed, link.open("wb") as file:
        shutil.copyfileobj(cast(Any, packed), file)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file or link at once, whoever else does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        write(Path(folder) / path.name)
        os.replace(Path(folder) / path.name, path)


if __name__ == "__main__":
    try:
        download(sys.argv[1], DEFAULT_SPLITS["dataset_name"])
    except HubError as reason:
        sys.exit(str(reason))
