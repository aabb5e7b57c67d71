# pyright: basic
"""State files of DeepSpeed and `torch.distributed.checkpoint`, which contain pickles.

Invariant: they are read as data of the types that these libraries write.
"""

import io
import pickle
import re
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import metadata as formats
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

METADATA = ".metadata"
METADATA_TYPES: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__name__): kind
    for kind in (
        formats.Metadata,
        formats.MetadataIndex,
        formats.TensorStorageMetadata,
        formats.BytesStorageMetadata,
        formats.ChunkStorageMetadata,
        formats.TensorProperties,
        formats.StorageMeta,
        formats._MEM_FORMAT_ENCODING,
        _StorageInfo,
        torch.Size,
    )
} | {
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # pyright: ignore[reportAttributeAccessIssue]
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,
}


class StateFileError(RuntimeError):
    """Unreadable state file, or one with more than state; nothing of it was run."""


def load_deepspeed_state(path: str, map_location: Any = None) -> Any:
    """Read a file as `CheckpointEngine.load` does.

    Raises:
        StateFileError: it holds more than tensors, plain values and four types of DeepSpeed's.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler  # noqa: PLC0415
    from deepspeed.runtime.zero.config import ZeroStageEnum  # noqa: PLC0415
    from deepspeed.utils.tensor_fragment import fragment_address  # noqa: PLC0415

    try:
        with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]):
            return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:  # a damaged pickle raises anything
        raise _refusal(path, error) from None


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read safetensors; raises StateFileError."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise _refusal(path, error) from None


class StateReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> formats.Metadata:
        del args, kwargs
        path = Path(self.path) / METADATA
        try:
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
            if any(
                PurePosixPath(info.relative_path).name != info.relative_path for info in metadata.storage_data.values()
            ):
                raise ValueError("it names files outside of its folder")
        except FileNotFoundError:
            raise
        except Exception as error:
            raise _refusal(path, error) from None
        metadata.storage_meta = formats.StorageMeta(load_id=self.load_id)
        return metadata


class StatePlanner(DefaultLoadPlanner):
    """Planner that reads values beside tensors as data."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        try:
            content = torch.load(value, weights_only=True)
        except Exception as error:
            raise _refusal(f"the value {read_item.dest_index.fqn}", error) from None
        # The base class unpickles without limits: it gets a copy of what was read
        copy = io.BytesIO()
        torch.save(content, copy)
        copy.seek(0)
        super().load_bytes(read_item, copy)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) in METADATA_TYPES:
            return METADATA_TYPES[module, name]
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name} was not allowed")


def _refusal(path: object, error: Exception) -> StateFileError:
    unknown = re.search(r"GLOBAL (\S+) w", str(error))
    # torch's text advises to unpickle the file without limits
    text = str(error).rpartition("WeightsUnpickler error: ")[2].split("\n")[0]
    reason = f"it names {unknown[1]}, which would run when it is unpickled" if unknown else text
    return StateFileError(f"{path} is no state of this engine and was not read: {reason}")
