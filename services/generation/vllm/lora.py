"""Low-rank adapters on the base weights, inside vLLM's worker.

A run's adapter has a fixed name; new versions replace an adapter between steps. Invariants: an adapter is loaded on
exactly the layers that its file names; the base is compared as without adapters.
"""

# pyright: basic
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA, LoRAMapping, VocabParallelEmbeddingWithLoRA
from vllm.lora.request import LoRARequest

from offbeat.services.generation.adapter_settings import ADAPTER_WEIGHTS, PREFIX, read_scaling
from offbeat.services.generation.tensor_file import TensorFile
from offbeat.services.generation.vllm.loading import TOLERANCE, LoadError, fused_names, renamer

NAME, NUMBER = "policy", 1
BASE = "model.safetensors"
VOCABULARY = (VocabParallelEmbeddingWithLoRA, LogitsProcessorWithLoRA)


def request() -> LoRARequest:
    return LoRARequest(NAME, NUMBER, NAME)


def skip_vocabulary_layers(model: Any, manager: Any, *, is_compiled: bool) -> None:
    """Exclude embeddings and head, for which vLLM on a CPU gathers [tokens, rank, vocabulary].

    is_compiled: code that reads the embeddings' wrapper is compiled by now, so these stay, without an adapter.
    """
    for parent, name, layer in _wrap(model):
        if isinstance(layer, LogitsProcessorWithLoRA if is_compiled else VOCABULARY):
            parent._modules[name] = layer.base_layer
            for path in [path for path, each in manager.modules.items() if each is layer]:
                del manager.modules[path]


def score_by_adapter(runner: Any) -> None:
    """Score each prompt under its own adapter: vLLM takes the output embeddings' adapters of other sequences."""
    score, waiting = runner._get_prompt_logprobs_dict, runner.num_prompt_logprobs

    def score_each(*arguments: Any) -> dict[str, Any]:
        scores: dict[str, Any] = {}
        unfinished: dict[str, int] = {}
        for request_id, count in list(waiting.items()):
            waiting.clear()
            waiting[request_id] = count
            with _adapted_logits(runner, runner.requests[request_id].lora_request):
                scores |= score(*arguments)  # removes the request once all of its prompt is scored
            unfinished |= waiting
        waiting.clear()
        waiting.update(unfinished)
        return scores

    runner._get_prompt_logprobs_dict = score_each


@contextmanager
def _adapted_logits(runner: Any, lora: LoRARequest | None) -> Iterator[None]:
    """Compute logits of any number of tokens with one adapter."""
    model, manager = runner.model, runner.lora_manager._adapter_manager
    compute, number = model.compute_logits, 0 if lora is None else lora.lora_int_id

    def compute_adapted(hidden: torch.Tensor) -> torch.Tensor:
        each = (number,) * len(hidden)
        manager.set_adapter_mapping(LoRAMapping(each, each, is_prefill=True))
        return compute(hidden)

    model.compute_logits = compute_adapted
    try:
        yield
    finally:
        del model.compute_logits


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


def take_adapter(runner: Any, folder: Path, name: str = NAME, number: int = NUMBER) -> None:
    """Replace an adapter by a folder's, or add it; on any error the adapters are as before.

    Raises:
        LoadError: the layers differ from the file.
    """
    workers, manager = runner.lora_manager, runner.lora_manager._adapter_manager
    earlier = manager.get_adapter(number)
    try:
        workers.add_adapter(LoRARequest(name, number, str(folder), load_inplace=True))
        slot = manager.lora_index_to_id.index(number)
        with TensorFile(folder / ADAPTER_WEIGHTS) as file:
            _compare(manager.modules, slot, runner.get_model(), file, read_scaling(folder))
    except Exception:
        if manager.get_adapter(number) is not earlier:
            workers.remove_adapter(number)  # else it would take a slot, on a CPU even that of requests without adapter
            if earlier is not None:
                manager._registered_adapters[number] = earlier
                manager.activate_adapter(number)
        raise


def _wrap(model: Any) -> list[tuple[Any, str, Any]]:
    return [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, BaseLayerWithLoRA)
    ]


def _compare(layers: dict[str, Any], slot: int, model: Any, file: TensorFile, scaling: float) -> None:
    fused, rename = fused_names(model), renamer(model)
    places = {part: (whole, number) for whole, parts in fused.items() for number, part in enumerate(parts)}
    named: set[tuple[str, int]] = set()
    for key, wanted in file.items():
        path, kind, _ = key.removeprefix(PREFIX).rsplit(".", 2)
        parent, _, leaf = (rename(path) or path).rpartition(".")
        whole, number = places.get(leaf, (leaf, 0))
        owner = f"{parent}.{whole}" if parent else whole
        if owner not in layers:
            raise LoadError(f"{path} takes no adapter here")
        up = kind == "lora_B"
        stacked = _stacked(layers[owner], up=up)
        slices = _slices_of(number, len(fused.get(whole, [leaf])), len(stacked))
        named.update((owner, each) for each in slices)
        held = [stacked[each][slot, 0] for each in slices]
        expected = wanted.float() * (scaling if up else 1.0)
        if not all(_agrees(each, expected) for each in ([torch.cat(held)] if up else held)):
            raise LoadError(f"{path}.{kind} differs from the file after loading")
    for owner, layer in layers.items():
        for number, up in enumerate(_stacked(layer, up=True)):
            if (owner, number) not in named and bool(up[slot].any()):
                raise LoadError(f"{owner} holds an adapter that is not in the file")


def _slices_of(number: int, num_parts: int, num_slices: int) -> range:
    """Return the slices of a fused layer's part; the first has those that are left, as queries, keys and values have."""
    first = num_slices - num_parts
    return range(first + number, first + number + 1) if number else range(first + 1)


def _stacked(layer: Any, *, up: bool) -> Sequence[torch.Tensor]:
    """Return factors by part of a fused layer, each [slots, 1, rows, columns]."""
    stacked = layer.lora_b_stacked if up else layer.lora_a_stacked
    return (stacked,) if isinstance(stacked, torch.Tensor) else stacked


def _agrees(held: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether factors are equal, and zero beyond `wanted`."""
    rows, columns = wanted.shape
    if held.shape[0] < rows or held.shape[1] < columns:
        return True  # one worker's part of it
    room = held.clone()
    room[:rows, :columns] = 0
    error = (held[:rows, :columns].float() - wanted.to(held.device)).abs().max()
    return not bool(room.any()) and bool(error <= TOLERANCE[held.dtype] * wanted.abs().max())
