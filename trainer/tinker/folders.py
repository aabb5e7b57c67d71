"""Files of a Tinker server.

Invariant: a final name means complete.
"""

import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from offbeat.services.durable_files import make_folder, sync_file, sync_folder, sync_tree
from offbeat.services.tinker.records import SEGMENTS, CheckpointKind

STATE = "state.safetensors"
"""Weights and moments of a training checkpoint, beside the adapter."""


class TinkerFolder:
    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        for name in ("states", "checkpoints", "samplers"):
            make_folder(self.root / name)

    def state(self, model_id: str) -> Path:
        """Return a model's state file."""
        return self.root / "states" / f"{model_id}.safetensors"

    def discard(self, model_id: str) -> None:
        """Delete a model's state and published adapters."""
        self.state(model_id).unlink(missing_ok=True)
        shutil.rmtree(self.root / "samplers" / model_id, ignore_errors=True)

    def checkpoint(self, model_id: str, kind: CheckpointKind, name: str, seq_id: int) -> Path:
        """Return the folder of a command's checkpoint; overwriting uses another, as a load may read the first."""
        return self.root / "checkpoints" / model_id / SEGMENTS[kind] / f"{name}@{seq_id}"

    def sampler(self, model_id: str, seq_id: int) -> Path:
        """Return the folder of a command's published adapter."""
        return self.root / "samplers" / model_id / str(seq_id)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Replace a safetensors file."""
    temporary = path.with_name(f".{path.name}")
    save_file(tensors, temporary, metadata=metadata)
    sync_file(temporary)
    temporary.replace(path)
    sync_folder(path.parent)


def publish(written: Path, final: Path) -> None:
    """Rename a complete folder, replacing a killed learner's."""
    sync_tree(written)
    make_folder(final.parent)
    if final.exists():
        shutil.rmtree(final)
    written.rename(final)
    sync_folder(final.parent)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
