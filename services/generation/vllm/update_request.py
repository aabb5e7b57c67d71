"""How vLLM's worker gets at a version: what it is asked to do with the path that a replica has fetched."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIX = ".json"
"""Of what tells the engine how to fetch weights from a learner's GPU."""
TAKE_ADAPTER = "take_adapter"


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """How the worker gets at a version."""

    init: dict[str, Any] | None
    """What vLLM's transfer engine is told first."""
    method: str
    arguments: dict[str, Any]


def update_request_of(path: Path) -> UpdateRequest:
    """For a file, an adapter's folder, or what a learner wrote for a replica that reaches its GPU (see `weights.pulls`)."""
    if path.is_dir():
        return UpdateRequest(None, TAKE_ADAPTER, {"folder": str(path)})
    if path.suffix != SUFFIX:
        return UpdateRequest(None, "take_weights", {"update_info": {"path": str(path)}})
    written = json.loads(path.read_bytes())
    return UpdateRequest(written["init"], "take_weights", {"update_info": written["update"]})


def is_whole(path: Path) -> bool:
    """Whether it is a file of all weights."""
    return path.suffix != SUFFIX and not path.is_dir()
