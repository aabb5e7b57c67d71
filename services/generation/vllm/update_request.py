"""Request to vLLM's worker to load a version."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIX = ".json"
"""Of pulls from a learner's GPU."""
TAKE_ADAPTER = "take_adapter"


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    init: dict[str, Any] | None
    method: str
    arguments: dict[str, Any]


def update_request_of(path: Path) -> UpdateRequest:
    """Return the request for a file, an adapter's folder or a GPU pull."""
    if path.is_dir():
        return UpdateRequest(None, TAKE_ADAPTER, {"folder": str(path)})
    if path.suffix != SUFFIX:
        return UpdateRequest(None, "take_weights", {"update_info": {"path": str(path)}})
    written = json.loads(path.read_bytes())
    return UpdateRequest(written["init"], "take_weights", {"update_info": written["update"]})


def is_whole(path: Path) -> bool:
    return path.suffix != SUFFIX and not path.is_dir()
