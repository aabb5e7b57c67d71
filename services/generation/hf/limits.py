"""Models that `hf_infer` serves, from `config.json`."""

from collections.abc import Mapping
from typing import Any

from offbeat.services.generation.kv_cache import layer_kinds, text_config

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


def architecture_problem(architecture: Mapping[str, Any]) -> str | None:
    text = text_config(architecture)
    if "vision_config" in architecture:
        return "it is multimodal, and hf_infer computes text models alone"
    kinds = set(layer_kinds(architecture)) - ATTENTION_LAYERS
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}, and hf_infer keeps keys and values alone"
    if text.get("attn_logit_softcapping") is not None:
        return "its attention caps logits, which hf_infer does not"
    return None
