"""Marker of a run's folder, and folders that a run may not use.

Invariant: nothing in a folder is moved or removed without the marker or files that only a run writes (of earlier
builds).
"""

import itertools
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

MARKER = ".offbeat-run"
CONFIG = "config.yaml"
CONFIG_KEYS = (
    *("exp_name", "output_dir", "custom_envs", "sequence_length", "rollout_batch_size", "max_ckpt_to_keep"),
    *("actor_train", "actor_infer", "rollout", "buffer", "weights", "redis", "control", "final_val_batch_size"),
)
"""Keys of every saved configuration."""
CONFIG_CHARS = 1 << 16
EVIDENCE = ("ledger/steps.jsonl", "ledger/groups.jsonl", "checkpoints/step-*/learner.json")
"""Files that only a run writes."""
BESIDE_CONFIG = ("ledger", "logs", "metrics.jsonl", "report.json", ".claim")
"""A run's files, beside a saved configuration."""
REDIS_FILES = ("redis.lock", "appendonly.aof", "appendonlydir")
MAX_DEPTH, MAX_FOLDERS = 4, 20_000
"""Limits of the search for other runs below."""


class FolderInUseError(Exception):
    """Folder with another command, another run or foreign files."""


@dataclass(frozen=True, slots=True)
class RunMarker:
    run_id: str
    """Empty if unknown."""
    incarnation: str = ""
    """Unique among runs of a name; empty for earlier builds."""
    created_at: float = 0.0
    """Unix time, s."""


def identify(folder: Path) -> RunMarker | None:
    """Return the folder's run, by its marker or an earlier build's files."""
    try:
        tree = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return RunMarker(str(tree["run_id"]), str(tree["incarnation"]), float(tree["created_at"]))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        return RunMarker("") if (folder / MARKER).is_file() else None
    with suppress(OSError, ValueError):
        text = (folder / CONFIG).read_text(encoding="utf-8")[:CONFIG_CHARS]
        values = {key: re.search(rf"^{key}:[ ]*(.*)$", text, re.MULTILINE) for key in CONFIG_KEYS}
        name = values["exp_name"]
        if all(values.values()) and name and any((folder / each).exists() for each in BESIDE_CONFIG):
            return RunMarker(name[1].strip("'\" "))
    return RunMarker("") if any(any(folder.glob(each)) for each in EVIDENCE) else None


def mark(folder: Path, run_id: str) -> None:
    marker = RunMarker(run_id, secrets.token_hex(8), time.time())
    temporary = folder / f"{MARKER}.{marker.incarnation}"
    temporary.write_text(json.dumps(asdict(marker)) + "\n", encoding="utf-8")
    temporary.replace(folder / MARKER)


def find_conflict(folder: Path) -> str:
    """Return why a run in `folder` would touch another run's or a Redis' files, or ""."""
    folder = folder.resolve()
    for parent in folder.parents:
        if what := _describe(parent):
            return f"output_dir {folder} is inside {parent}, {what}: choose a folder outside of it"
    if _holds_redis(folder):
        return f"output_dir {folder} is {_REDIS}: choose another folder"
    own_redis = folder / "redis" if identify(folder) else None
    for inner in itertools.islice(_folders_below(folder, MAX_DEPTH), MAX_FOLDERS):
        if inner != own_redis and (what := _describe(inner)):
            return (
                f"output_dir {folder} contains {inner}, {what}: choose a folder of its own, such as {folder / 'NAME'}"
            )
    return ""


_REDIS = "the state of a Redis"


def _describe(folder: Path) -> str:
    if _holds_redis(folder):
        return _REDIS
    marker = identify(folder)
    return "" if marker is None else f"the folder of run {marker.run_id!r}" if marker.run_id else "a run's folder"


def _holds_redis(folder: Path) -> bool:
    return any((folder / name).exists() for name in REDIS_FILES)


def _folders_below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield folders, grouped by parent, without following links."""
    if depth == 0:
        return
    try:
        with os.scandir(folder) as found:
            inner = sorted(Path(each.path) for each in found if each.is_dir(follow_symlinks=False))
    except OSError:
        return
    yield from inner
    for each in inner:
        if not each.name.startswith("."):
            yield from _folders_below(each, depth - 1)
