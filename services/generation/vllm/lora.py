"""A low-rank adapter on the base weights, inside vLLM's worker.

The only adapter has a fixed name; new versions replace it between steps. Invariants: it is loaded on exactly the layers
that its file names; the base is compared as without adapters.
"""

# pyright: basic
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA
from vllm.lora.request import LoRARequest

from offbeat.services.generation.tensor_file import TensorFile
from offbeat.services.generation.vllm.loading import TOLERANCE, LoadError, fused_names

NAME, NUMBER = "policy", 1
SETTINGS, ADAPTER, BASE = "adapter_config.json", "adapter_model.safetensors", "model.safetensors"
"""PEFT's file names."""
PREFIX = "base_model.model."
VOCABULARY = (VocabParallelEmbeddingWithLoRA, LogitsProcessorWithLoRA)


def request() -> LoRARequest:
    return LoRARequest(NAME, NUMBER, NAME)


def skip_vocabulary_layers(model: Any, manager: Any) -> None:
    """Exclude embeddings and head, for which vLLM on a CPU gathers [tokens, rank, vocabulary]."""
    for parent, name, layer in _wrap(model):
        if isinstance(layer, VOCABULARY):
            parent._modules[name] = layer.base_layer
            for path in [path for path, each in manager.modules.items() if each is layer]:
                del manager.modules[path]


@contextmanager
def unwrap(model: Any) -> Iterator[None]:
    """Remove adapter wrappers temporarily; nothing may be sampled."""
    wrapped = _wrap(model)
    for parent, name, layer in wrapped:
        parent._modules[name] = layer.base_layer
    try:
        yield
    finally:
        for parent, name, layer in wrapped:
            parent._modules[name] = layer


def take_adapter(runner: Any, folder: Path) -> None:
    """Replace the adapter by a folder's.

    Raises:
        LoadError: the layers differ from the file.
    """
    workers = runner.lora_manager
    workers.add_adapter(LoRARequest(NAME, NUMBER, str(folder), load_inplace=True))
    with TensorFile(folder / ADAPTER) as file:
        _compare(workers._adapter_manager.modules, fused_names(runner.get_model()), file, _scaling(folder))


def _wrap(model: Any) -> list[tuple[Any, str, Any]]:
    return [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, BaseLayerWithLoRA)
    ]


def _scaling(folder: Path) -> float:
    settings = json.loads((folder / SETTINGS).read_text())
    return settings["lora_alpha"] / settings["r"]


def _compare(layers: dict[str, Any], fused: dict[str, list[str]], file: TensorFile, scaling: float) -> None:
    places = {part: (whole, number) for whole, parts in fused.items() for number, part in enumerate(parts)}
    named: set[tuple[str, int]] = set()
    for key, wanted in file.items():
        path, kind, _ = key.removeprefix(PREFIX).rsplit(".", 2)
        parent, _, leaf = path.rpartition(".")
        whole, number = places.get(leaf, (leaf, 0))
        owner = f"{parent}.{whole}"
        if owner not in layers:
            raise LoadError(f"{path} takes no adapter here")
        named.add((owner, number))
        up = kind == "lora_B"
        held = (layers[owner].lora_b_stacked if up else layers[owner].lora_a_stacked)[number][0, 0]
        if not _agrees(held, wanted.float() * (scaling if up else 1.0)):
            raise LoadError(f"{path}.{kind} differs from the file after loading")
    for owner, layer in layers.items():
        for number, up in enumerate(layer.lora_b_stacked):
            if (owner, number) not in named and bool(up.any()):
                raise LoadError(f"{owner} holds an adapter that is not in the file")


def _agrees(held: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether factors are equal, and zero beyond `wanted`."""
    rows, columns = wanted.shape
    if held.shape[0] < rows or held.shape[1] < columns:
        return True  # one worker's part of it
    room = held.clone()
    room[:rows, :columns] = 0
    error = (held[:rows, :columns].float() - wanted.to(held.device)).abs().max()
    return not bool(room.any()) and bool(error <= TOLERANCE[held.dtype] * wanted.abs().max())
