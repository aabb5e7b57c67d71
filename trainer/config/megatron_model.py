"""Models that `megatron_train` trains."""

from collections.abc import Mapping
from typing import Any

DENSE_MODELS = ("llama", "qwen2", "qwen3")
MOE_MODELS = ("qwen2_moe", "qwen3_moe")
FIXED_VALUES: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
}
"""Values of `config.json` that these models may have; a missing key or null is one, too."""


def find_megatron_obstacle(architecture: Mapping[str, Any]) -> str:
    """Return why Megatron can't train a model, or "". architecture: `config.json`."""
    model_type = architecture.get("model_type")
    if model_type not in (*DENSE_MODELS, *MOE_MODELS):
        return f"it trains {', '.join((*DENSE_MODELS, *MOE_MODELS))}, and the model is {model_type}"
    for key, values in FIXED_VALUES.items():
        value = architecture.get(key)
        if value is not None and value not in values:
            return f"the model's {key} is {value}, and it trains only models with {values[0]}"
    if architecture.get("attention_bias") and model_type != "qwen2_moe":
        return "the model's attention_bias is true, and it trains only models without one in attention's output"
    if architecture.get("num_experts_per_tok") == 1 and architecture.get("norm_topk_prob"):
        return "the model's num_experts_per_tok is 1 with norm_topk_prob, which gives its router no gradient"
    rope: Mapping[str, object] = architecture.get("rope_parameters") or architecture.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        return f"the model's rope_type is {kind}, and it computes default, linear and llama3"
    return ""
