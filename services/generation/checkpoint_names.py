"""Weights by the names of checkpoints, which other programs load; learners have those of transformers' models in memory.

Invariant: a tensor that has its checkpoint's name already keeps it. Tensors that a checkpoint fuses are not joined.
"""

# pyright: basic
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

FUSED = {
    "cohere2_moe",
    "dots1",
    "glm4_moe",
    "granitemoe",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "mellum",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "solar_open",
}
"""Families whose stacked experts vLLM takes as they are, which is faster than one by one."""

IN_MEMORY = {"gemma3", "mistral3"}
"""Multimodal families whose names in memory are loaded, too, by transformers and vLLM; older checkpoints have others."""

TRANSPOSED = {"qwen3_vl_moe"}
"""Families whose published files have the last two dimensions of stacked experts exchanged, as vLLM reads them; transformers
reads both by their shapes, and writes its own. Of square ones nobody could tell.
"""
STACKED_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


def engine_tensors(config: Any, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights as vLLM's model loads them: by a checkpoint's names, or stacked. config: of transformers"""
    yield from tensors if config.model_type in FUSED else checkpoint_tensors(config, tensors)


def checkpoint_tensors(config: Any, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's weights by the names and in the layout of its published files. config: of transformers"""
    if config.model_type in TRANSPOSED:
        text = config.get_text_config()
        in_memory = (2 * text.moe_intermediate_size, text.hidden_size), (text.hidden_size, text.moe_intermediate_size)
        for name, tensor in tensors:
            is_in_memory = name.endswith(STACKED_EXPERTS) and tuple(tensor.shape[1:]) in in_memory
            yield name, tensor.transpose(1, 2).contiguous() if is_in_memory else tensor
        return
    mapping = None if config.model_type in IN_MEMORY else get_checkpoint_conversion_mapping(config.model_type)
    # As transformers does for models that it has not loaded: a prefix that no name had would be added
    conversions = [each for each in mapping or () if not isinstance(each, PrefixChange)]
    if not conversions:
        yield from tensors
        return
    model: Any = SimpleNamespace(_weight_conversions=conversions, config=config)
    for name, tensor in tensors:
        yield from revert_weight_conversion(model, {name: tensor}).items()
