"""Models of the Hugging Face hub: `ORGANIZATION/NAME` or `ORGANIZATION/NAME@REVISION` becomes a snapshot's folder.

Invariant: an id is resolved once, where a configuration is read, so that engine, learner and workers see one folder. The
hub's environment variables hold (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE).
"""

import copy
import re
from pathlib import Path
from typing import Any

import httpx

from offbeat.trainer.config.aliases import find_keys
from offbeat.trainer.config.issue import ConfigIssue

HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
WEIGHTS = ["*.bin"]
"""For repositories without safetensors."""
MODEL_KEYS = (
    "pretrain",
    "reward_pretrain",
    *(f"{role}.model_args.model_name_or_path" for role in ("critic", "reference", "teacher.*")),
)
"""Models' keys; `*` stands for any name."""
TIMEOUT_S = 5.0
"""Limit of the hub's first answer; its client would wait for minutes."""


class HubError(ValueError):
    """Id that no model was found for."""


def is_hub_id(name: str, folder: Path = Path()) -> bool:
    """Return True if `name` may be a hub model rather than one in `folder`."""
    return HUB_ID.fullmatch(name) is not None and not (folder / name).exists()


def resolve_models(tree: dict[str, Any]) -> tuple[dict[str, Any], list[ConfigIssue]]:
    """Return a canonical tree with folders for hub ids, and an issue per unresolved id."""
    resolved = copy.deepcopy(tree)
    folders: dict[str, str] = {}
    issues: list[ConfigIssue] = []
    for pattern in MODEL_KEYS:
        for path, table in find_keys(resolved, pattern):
            name = table[path[-1]]
            if not isinstance(name, str) or not is_hub_id(name):
                continue
            try:
                folders[name] = folders.get(name) or str(download(name))
            except HubError as error:
                issues.append(ConfigIssue(".".join(path), str(error)))
            else:
                table[path[-1]] = folders[name]
    return resolved, issues


def download(name: str) -> Path:
    """Return a snapshot's folder, from the cache if the hub can't be reached.

    Raises:
        HubError: no such model or revision, no access, no connection, or no weights.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match = HUB_ID.fullmatch(name)
    assert match is not None, "is_hub_id"
    repo, revision, absent = match["id"], match["revision"], f"there is no folder {name}, and"
    try:
        for patterns in (FILES, [*FILES, *WEIGHTS]):
            offline = constants.HF_HUB_OFFLINE or not _answers(constants.ENDPOINT)
            folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=offline))
            if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
                return folder
    except GatedRepoError as error:
        raise HubError(f"{repo} asks for its license to be accepted: accept it on the hub, and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise HubError(f"{repo} has no revision {revision!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise HubError(f"{absent} no model {repo} on the hub that HF_TOKEN may read") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise HubError(
            f"{absent} the model hub can't be reached, and its cache has no snapshot of {repo}: set pretrain to a local "
            "Hugging Face folder, or fill the cache where there is a connection (`hf download`)"
        ) from error
    raise HubError(f"the snapshot of {repo} has no weights (*.safetensors, pytorch_model*.bin)")


def _answers(endpoint: str) -> bool:
    try:
        httpx.head(endpoint, timeout=TIMEOUT_S)
    except (httpx.HTTPError, OSError):
        return False
    return True
