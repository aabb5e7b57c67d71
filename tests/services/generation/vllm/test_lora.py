"""Wrappers of adapters in vLLM's model."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from vllm.lora.layers import LogitsProcessorWithLoRA, RowParallelLinearWithLoRA, VocabParallelEmbeddingWithLoRA

from offbeat.services.generation.vllm.lora import skip_vocabulary_layers

KINDS = {
    "embed_tokens": VocabParallelEmbeddingWithLoRA,
    "o_proj": RowParallelLinearWithLoRA,
    "logits_processor": LogitsProcessorWithLoRA,
}


def wrapped(kind: type[nn.Module]) -> Any:
    layer: Any = kind.__new__(kind)
    nn.Module.__init__(layer)
    layer.base_layer = nn.Identity()
    return layer


@pytest.mark.parametrize(
    ("is_compiled", "expected"), [(False, ["o_proj"]), (True, ["embed_tokens", "o_proj"])], ids=["eager", "compiled"]
)
def test_compiled_code_keeps_the_wrapper_of_embeddings_that_it_reads(is_compiled: bool, expected: list[str]) -> None:
    """The head is computed outside of what vLLM compiles."""
    model = nn.ModuleDict({name: wrapped(kind) for name, kind in KINDS.items()})
    manager = SimpleNamespace(modules=dict(model.items()))
    skip_vocabulary_layers(model, manager, is_compiled=is_compiled)
    assert list(manager.modules) == expected
    assert [name for name, layer in model.items() if hasattr(layer, "base_layer")] == expected
