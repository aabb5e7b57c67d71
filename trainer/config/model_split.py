from collections.abc import Mapping
from typing import Any

DIVIDED_LAYERS = {"full_attention", "sliding_attention", "linear_attention"}
"""Kinds of layers that sequence parallelism divides by heads; of linear attention the gated delta rule alone."""


def find_obstacle(architecture: Mapping[str, Any], size: int) -> str:
    """Return why layers can't be split over `size` processes, or "". architecture: `config.json` of the text model."""
    heads = architecture.get("num_attention_heads")
    counts = {
        "num_attention_heads": heads,
        "num_key_value_heads": architecture.get("num_key_value_heads") or heads,
        "intermediate_size": architecture.get("intermediate_size"),
    }
    for key, count in counts.items():
        if isinstance(count, int) and count % size:
            return f"the model's {key}, {count}, is not a multiple of it"
    return ""


def find_sequence_obstacle(architecture: Mapping[str, Any], size: int) -> str:
    """Return why tokens can't be split over `size` processes, or "". architecture: as in `find_obstacle`."""
    heads = architecture.get("num_attention_heads")
    shared = architecture.get("num_key_value_heads") or heads
    if isinstance(heads, int) and heads % size:
        return f"the model's num_attention_heads, {heads}, is not a multiple of it"
    if isinstance(shared, int) and shared % size and size % shared:
        return f"the model's num_key_value_heads, {shared}, is neither a multiple nor a divisor of it"
    keys = architecture.get("linear_num_key_heads")
    if isinstance(keys, int) and keys % size:
        return f"the model's linear_num_key_heads, {keys}, is not a multiple of it"
    if others := sorted(set(architecture.get("layer_types") or ()) - DIVIDED_LAYERS):
        return f"layers of {', '.join(others)} are not divided by heads: take 1"
    return ""


def find_stage_obstacle(architecture: Mapping[str, Any], size: int) -> str:
    """Return why the layers can't be distributed over `size` stages, or "". architecture: as in `find_obstacle`."""
    layers = architecture.get("num_hidden_layers")
    if isinstance(layers, int) and layers < size:
        return f"the model's num_hidden_layers, {layers}, are fewer: take at most {layers}"
    return ""
