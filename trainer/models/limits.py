# pyright: basic
"""Models whose sequences can be packed into one row, by their class and `config.json`; no weights are read."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat.services.generation.checkpoint_names import TRANSPOSED
from offbeat.services.generation.config import AttentionName
from offbeat.trainer.models.recurrent_layers import RECURRENT_LAYERS

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
CHUNKED = "chunked_attention"
OWN_MASKS: Mapping[str, tuple[AttentionName, ...]] = {
    "stablelm": ("sdpa", "eager"),
    **dict.fromkeys(("gptj", "gpt_neo", "codegen"), ("eager",)),
}
"""Attention of these families that can't be replaced, and masks packed sequences by their positions."""
UNMASKED = ("afmoe", "biogpt", "gpt_oss", "granitemoehybrid", "opt")
"""Families whose own masks ignore positions, so that packed sequences mix but by our attention."""
SINKS = ("gpt_oss",)
"""Families of `UNMASKED` that our attention does not compute."""
RANDOM_EXPERTS = ("phimoe",)
EXAMPLES = "such as Qwen2.5, Qwen3, Llama 3 or Mistral"
INSTEAD = f"take a model with attention alone, {EXAMPLES}"


def packing_problem(auto: Any, folder: Path, attention: AttentionName = "auto", context: int = 0) -> str | None:
    """Return why a folder's model can't be trained, or None.

    auto: transformers' loader; attention: `attn_implementation`; context: tokens of the longest sequence, 0 if unknown.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a model's code makes of its config.json
        return f"transformers can't read its config.json: {str(error).partition(chr(10))[0]}"
    kind, name, text = _find_class(auto, config), config.model_type, config.get_text_config()
    if method := _quantization(config) or _quantization(text):
        return (
            f"its weights are quantized ({method}), of which neither gradients nor versions for engines can be made: take a "
            "bfloat16 copy of it, without quantization_config in config.json"
        )
    if kind is None:
        return f"{auto.__name__} of transformers has no {name}: take a family that it has, {EXAMPLES}"
    if name in RANDOM_EXPERTS:
        return f"{name} draws its experts at random in training, others than the engine's: {INSTEAD}"
    layers, is_packed = set(getattr(text, "layer_types", None) or ()), text.model_type in RECURRENT_LAYERS
    if not is_packed and (others := sorted(layers - ATTENTION_LAYERS - {CHUNKED})):
        return f"{name} has layers of {', '.join(others)}, by which packed sequences would change each other: {INSTEAD}"
    if kind._is_stateful and not layers and not is_packed:  # layers of attention alone hold no state
        return f"{name} is recurrent, so that packed sequences would change each other: {INSTEAD}"
    if not (kind._supports_attention_backend or is_packed) and attention not in OWN_MASKS.get(name, ()):
        instead = f"set attn_implementation to eager, or {INSTEAD}" if name in OWN_MASKS else INSTEAD
        return f"transformers can't replace the attention of {name}, so that packed sequences would mix: {instead}"
    if name in SINKS:
        return f"packed sequences of {name}, whose attention has sinks, would mix: {INSTEAD}"
    if name in UNMASKED and attention != "auto":
        return f"attn_implementation {attention} of {name} would mix packed sequences: leave it out"
    if attention == "sdpa" and getattr(text, "attn_logit_softcapping", None) is not None:
        return f"{name} caps attention's logits, which sdpa does not: leave attn_implementation out, or set it to eager"
    if auto is AutoModelForCausalLM and hasattr(config, "vision_config") and kind.__name__ not in _names(config):
        return f"{name} has image input, which its language model in transformers leaves out: take a text model"
    if name in TRANSPOSED and text.hidden_size in (text.moe_intermediate_size, 2 * text.moe_intermediate_size):
        return (
            f"files of {name} have experts in either direction, which hidden_size {text.hidden_size} and "
            f"moe_intermediate_size {text.moe_intermediate_size} do not tell apart: take another size"
        )
    if name == "qwen3_vl_moe" and not getattr(text, "norm_topk_prob", True):
        return f"transformers normalizes the experts' weights of {name}: set norm_topk_prob to true, or {INSTEAD}"
    chunk = getattr(text, "attention_chunk_size", None) or 0
    if CHUNKED in layers and context > chunk:
        return f"{name} attends within chunks of {chunk} tokens: take a context of at most that, not {context}"
    for short in _longrope_limits(text):
        if context > short:
            return (
                f"{name} rotates all sequences of a batch otherwise if one has more than {short} tokens (longrope): take "
                f"a context of at most that, not {context}"
            )
    return None


def needs_eager_attention(model: nn.Module) -> bool:
    """Return whether attention caps logits (Gemma 2) or has sinks (MiMo-V2-Flash), which packed attention has not."""
    return any(
        isinstance(getattr(module, "sinks", None), Tensor)
        or getattr(module, "attn_logit_softcapping", None) is not None
        for module in model.modules()
    )


def _quantization(config: Any) -> str | None:
    """Return the method by which a model's weights are quantized."""
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return None
    return str(settings.get("quant_method") if isinstance(settings, Mapping) else settings)


def _find_class(auto: Any, config: Any) -> Any:
    """Return the class that `auto` makes, or None."""
    found = auto._model_mapping.get(type(config), None)
    classes = found if isinstance(found, list | tuple) else [found]
    return next((each for each in classes if each is not None and each.__name__ in _names(config)), classes[0])


def _names(config: Any) -> list[str]:
    return config.architectures or []


def _longrope_limits(text: Any) -> Iterator[int]:
    """Yield the lengths above which position frequencies change."""
    rope: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    for each in (rope, *rope.values()):
        if isinstance(each, Mapping) and each.get("rope_type") == "longrope":
            yield each["original_max_position_embeddings"]
