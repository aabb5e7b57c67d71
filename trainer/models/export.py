"""Hugging Face export, at most one shard in memory."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

MAX_SHARD_BYTES = 4 << 30
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".index.json")


def export_weights(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write safetensors, copying each tensor before requesting the next."""
    shards: list[tuple[Path, list[str]]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        path = folder / f"shard-{len(shards)}.safetensors"
        save_file(pending, path, metadata={"format": "pt"})
        shards.append((path, list(pending)))
        pending.clear()

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and size + num_bytes > shard_bytes:
            flush()
            size = 0
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += num_bytes
        total += num_bytes
    flush()
    _name_shards(folder, shards, total)


def _name_shards(folder: Path, shards: list[tuple[Path, list[str]]], total: int) -> None:
    if len(shards) == 1:
        shards[0][0].rename(folder / WEIGHTS)
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, start=1):
        shard_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path.rename(folder / shard_name)
        weight_map |= dict.fromkeys(names, shard_name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def copy_model_files(source: Path, folder: Path) -> None:
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, folder / path.name)
