"""Files of a Tinker server.

Invariant: what has its final name is complete.
"""

import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from offbeat.services.durable_files import make_folder, sync_file, sync_folder, sync_tree
from offbeat.services.tinker.records import SEGMENTS, CheckpointKind

STATE = "state.safetensors"
"""Of a training checkpoint: weights and moments, beside the adapter."""


class TinkerFolder:
    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        for name in ("states", "checkpoints", "samplers"):
            make_folder(self.root / name)

    def state(self, model_id: str) -> Path:
        """File from which a model goes on."""
        return self.root / "states" / f"{model_id}.safetensors"

    def checkpoint(self, model_id: str, kind: CheckpointKind, name: str, seq_id: int) -> Path:
        """Folder that a command saves; one that overwrites has another, because a load may still read the first."""
        return self.root / "checkpoints" / model_id / SEGMENTS[kind] / f"{name}@{seq_id}"

    def sampler(self, model_id: str, seq_id: int) -> Path:
        """Folder of the adapter that a command published."""
        return self.root / "samplers" / model_id / str(seq_id)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write safetensors in place of an earlier file."""
    temporary = path.with_name(f".{path.name}")
    save_file(tensors, temporary, metadata=metadata)
    sync_file(temporary)
    temporary.replace(path)
    sync_folder(path.parent)


def publish(written: Path, final: Path) -> None:
    """Give a complete folder its final name, in place of what a killed learner left there."""
    sync_tree(written)
    make_folder(final.parent)
    if final.exists():
        shutil.rmtree(final)
    written.rename(final)
    sync_folder(final.parent)


def size_of(folder: Path) -> int:
    """Return bytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
