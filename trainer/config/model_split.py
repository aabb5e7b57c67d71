from collections.abc import Mapping
from typing import Any

from offbeat.services.generation.kv_cache import layer_kinds

DIVIDED_LAYERS = {"full_attention", "sliding_attention", "linear_attention", "attention", "mlp", "moe"}
"""Kinds of layers that sequence parallelism divides by heads, or that have none."""
DIVIDED_FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Families whose linear attention is divided by heads."""


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
    kinds, family = set(layer_kinds(architecture)), architecture.get("model_type")
    if others := sorted(kinds - DIVIDED_LAYERS):
        return f"layers of {', '.join(others)} are not divided by heads: take 1"
    if "linear_attention" in kinds and family is not None and family not in DIVIDED_FAMILIES:
        return f"recurrent layers of {family} are not divided by heads: take 1"
    if architecture.get("attn_logit_softcapping") is not None:
        return "attention whose logits are capped is computed with all heads: take 1"
    return ""


def find_stage_obstacle(architecture: Mapping[str, Any], size: int) -> str:
    """Return why the layers can't be distributed over `size` stages, or "". architecture: as in `find_obstacle`."""
    layers = architecture.get("num_hidden_layers")
    if isinstance(layers, int) and layers < size:
        return f"the model's num_hidden_layers, {layers}, are fewer: take at most {layers}"
    return ""
