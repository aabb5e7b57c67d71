"""Models of the Hugging Face hub: `ORGANIZATION/NAME` or `ORGANIZATION/NAME@REVISION` becomes a snapshot's folder.

Invariant: an id is resolved once, where a configuration is read, so that engine, learner and workers see one folder;
or, by `find`, to one commit, downloaded later. The hub's environment variables apply (HF_HOME, HF_ENDPOINT, HF_TOKEN,
HF_HUB_OFFLINE). As a program, it downloads one snapshot.
"""

import copy
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from offbeat.trainer.config.aliases import find_keys
from offbeat.trainer.config.issue import ConfigIssue

HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
SECOND_COPIES = ["consolidated*"]
"""All weights once more, which Mistral's repositories have for its own software."""
WEIGHTS = ["*.bin"]
"""For repositories without safetensors."""
MODEL_KEYS = (
    "pretrain",
    "reward_pretrain",
    "actor_train.model_args.adapter_name_or_path",
    *(f"{role}.model_args.model_name_or_path" for role in ("critic", "reference", "teacher.*", "rewards.*")),
)
"""`*` stands for any name or place."""
TIMEOUT_S = float(os.environ.get("HF_HUB_ETAG_TIMEOUT", "5"))
"""Of the hub's first answer; by the variable of its library."""

SERVER_ERROR = 500
"""Lowest status of a failing hub."""


class HubError(ValueError):
    """Id without a model or dataset."""


class Kind(NamedTuple):
    """Words of errors."""

    name: str
    local: str
    """What an id is taken for, if it exists."""
    instead: str
    command: str


MODEL = Kind("model", "folder", "set pretrain to a local Hugging Face folder", "hf download")


def is_hub_id(name: str, folder: Path = Path()) -> bool:
    """Return whether `name` may be a hub model rather than one in `folder`."""
    return HUB_ID.fullmatch(name) is not None and not (folder / name).exists()


def resolve_models(tree: dict[str, Any], resolve: Callable[[str], str]) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Return a canonical tree with hub ids replaced by `resolve` (`download` or `find`), and an issue per failure."""
    resolved = copy.deepcopy(tree)
    found: dict[str, str] = {}
    issues: list[ConfigIssue] = []
    for path, table in _hub_models(resolved):
        name = table[path[-1]]
        try:
            found[name] = found.get(name) or resolve(name)
        except HubError as error:
            issues.append(ConfigIssue(".".join(path), str(error)))
        else:
            table[path[-1]] = found[name]
    return resolved, issues


def missing_models(tree: dict[str, Any]) -> list[str]:
    """Return the hub ids in a canonical tree."""
    return list(dict.fromkeys(table[path[-1]] for path, table in _hub_models(tree)))


def _hub_models(tree: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    for pattern in MODEL_KEYS:
        for path, table in find_keys(tree, pattern):
            name = table[path[-1]]
            if isinstance(name, str) and is_hub_id(name):
                yield path, table


def download(name: str) -> str:
    """Return a snapshot's folder, from the cache if the hub is unreachable.

    Raises:
        HubError: no such model or revision, no access, no connection, or no weights.
    """
    repo, revision = _split(name)
    with hub_errors(name, repo, revision):
        return _snapshot(repo, revision, local=not is_online())


def find(name: str) -> str:
    """Return, within seconds, a complete snapshot's folder, or `ID@COMMIT` of one to download.

    Raises:
        HubError: as `download`.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] -- of its HTTP client
        LocalEntryNotFoundError,
    )

    repo, revision = _split(name)
    with hub_errors(name, repo, revision):
        if not is_online():
            return _snapshot(repo, revision, local=True)
        try:
            commit = HfApi().model_info(repo, revision=revision, timeout=TIMEOUT_S).sha
        except HTTPError as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code < SERVER_ERROR:
                raise
            return _snapshot(repo, revision, local=True)
        try:
            return _snapshot(repo, commit, local=True)
        except LocalEntryNotFoundError:
            return f"{repo}@{commit}"


def _split(name: str) -> tuple[str, str | None]:
    match = HUB_ID.fullmatch(name)
    assert match is not None, "is_hub_id"
    return match["id"], match["revision"]


def _snapshot(repo: str, revision: str | None, *, local: bool) -> str:
    from huggingface_hub import snapshot_download

    for patterns in (FILES, [*FILES, *WEIGHTS]):
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=SECOND_COPIES,
                local_files_only=local,
            )
        )
        if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
            return str(folder)
    raise HubError(f"the snapshot of {repo} has no weights (*.safetensors, pytorch_model*.bin)")


@contextmanager
def hub_errors(name: str, repo: str, revision: str | None, kind: Kind = MODEL) -> Iterator[None]:
    """Translate the hub's errors to `HubError`."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] -- of its HTTP client
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    absent = f"there is no {kind.local} {name}, and"
    try:
        yield
    except GatedRepoError as error:
        raise HubError(f"{repo} asks for its license to be accepted: accept it on the hub, and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise HubError(f"{repo} has no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise HubError(f"{absent} no {kind.name} {repo} on the hub that HF_TOKEN may read") from error
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise HubError(
            f"{absent} the {kind.name} hub can't be reached, and its cache has no snapshot of {repo}: {kind.instead}, or "
            f"fill the cache where there is a connection (`{kind.command}`)"
        ) from error
    except (OSError, HTTPError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise HubError(f"{name} can't be downloaded from the hub: {reason}") from error


def is_online() -> bool:
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT)


def _answers(endpoint: str) -> bool:
    try:
        httpx.head(endpoint, timeout=TIMEOUT_S)
    except (httpx.HTTPError, OSError):
        return False
    return True


if __name__ == "__main__":
    try:
        download(sys.argv[1])
    except HubError as reason:
        sys.exit(str(reason))
