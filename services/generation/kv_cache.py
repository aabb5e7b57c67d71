"""Memory of a sequence in an engine, from a model's `config.json`: keys and values, and recurrent layers' states."""

from collections.abc import Mapping
from typing import Any

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
STATE_ITEMSIZE = 4
"""Of recurrent states, which vLLM keeps in float32."""
WITHOUT_KEYS = {"linear_attention", "conv", "mamba", "mlp", "moe"}
"""Kinds of layers that hold no keys and values."""
RECURRENT = {"linear_attention", "conv", "mamba", "hybrid"}
"""Kinds of layers that hold a state of one size for each sequence; `hybrid` ones hold keys and values, too."""
NEMOTRON = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}


def text_config(architecture: Mapping[str, Any]) -> Mapping[str, Any]:
    return architecture.get("text_config") or architecture


def layer_kinds(architecture: Mapping[str, Any]) -> list[str]:
    """Return each layer's kind; empty if all are of attention. Published folders name them in several ways."""
    text = text_config(architecture)
    if kinds := text.get("layer_types") or text.get("layers_block_type"):
        return list(kinds)
    if pattern := text.get("hybrid_override_pattern"):
        return [NEMOTRON[letter] for letter in pattern if letter in NEMOTRON]
    layers = range(text.get("num_hidden_layers", 0))
    if "linear_num_value_heads" in text:
        interval = text.get("full_attention_interval", 4)
        return ["linear_attention" if (n + 1) % interval else "full_attention" for n in layers]
    if text.get("model_type") == "falcon_h1":
        return ["hybrid" for _ in layers]
    for key, other in (("full_attn_idxs", "conv"), ("attn_layer_indices", "mamba")):
        if key in text:
            return ["full_attention" if n in text[key] else other for n in layers]
    return []


def bytes_per_token(architecture: Mapping[str, Any], itemsize: int) -> int:
    """Return the memory of one token's keys and values; raises `KeyError` for a missing key."""
    text = text_config(architecture)
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    dimension = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    kinds = layer_kinds(architecture)
    number = sum(kind not in WITHOUT_KEYS for kind in kinds) if kinds else text["num_hidden_layers"]
    return 2 * number * heads * dimension * itemsize


def bytes_per_sequence(architecture: Mapping[str, Any], itemsize: int) -> int:
    """Return the memory of a sequence's recurrent states; raises `KeyError` for a missing key."""
    text = text_config(architecture)
    kinds = [kind for kind in layer_kinds(architecture) if kind in RECURRENT]
    if not kinds:
        return 0
    if "conv" in kinds:
        return len(kinds) * text["conv_L_cache"] * text["hidden_size"] * itemsize
    if "linear_attention" in kinds and "linear_num_value_heads" in text:
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
        window = (text.get("linear_conv_kernel_dim", 4) - 1) * (2 * keys + values)
        return len(kinds) * (window * itemsize + values * text["linear_key_head_dim"] * STATE_ITEMSIZE)
    heads = text["mamba_n_heads"] * text["mamba_d_head"]
    window = (text.get("mamba_d_conv", 4) - 1) * (heads + 2 * text.get("mamba_n_groups", 1) * text["mamba_d_state"])
    return len(kinds) * (window * itemsize + heads * text["mamba_d_state"] * STATE_ITEMSIZE)


def cache_problem(kv_cache_gib: float, context: int, token_bytes: int) -> str | None:
    """Return why the cache can't hold a sequence; None if it can."""
    needed = context * token_bytes / 2**30
    if needed <= kv_cache_gib:
        return None
    return f"{kv_cache_gib:g} GiB hold no sequence of {context} tokens, which needs {needed:.3g}: take at least that"
