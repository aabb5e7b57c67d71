"""Memory of keys and values, from a model's `config.json`."""

from collections.abc import Mapping
from typing import Any

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def text_config(architecture: Mapping[str, Any]) -> Mapping[str, Any]:
    return architecture.get("text_config") or architecture


def bytes_per_token(architecture: Mapping[str, Any], itemsize: int) -> int:
    """Return the memory of one token's keys and values; raises `KeyError` for a missing key."""
    text = text_config(architecture)
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    dimension = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return 2 * text["num_hidden_layers"] * heads * dimension * itemsize


def cache_problem(kv_cache_gib: float, context: int, token_bytes: int) -> str | None:
    """Return why the cache can't hold a sequence; None if it can."""
    needed = context * token_bytes / 2**30
    if needed <= kv_cache_gib:
        return None
    return f"{kv_cache_gib:g} GiB hold no sequence of {context} tokens, which needs {needed:.3g}: take at least that"
