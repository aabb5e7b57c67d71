# pyright: basic
"""Tensor parallelism by transformers' plans (`base_model_tp_plan`) on DTensor."""

import logging
from collections.abc import Mapping
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    TensorParallelLayer,
    replace_layer_number_by_wildcard,
)

from offbeat.trainer.config.model_split import find_obstacle
from offbeat.trainer.models.lora import adapted_layers

EMBEDDINGS = ("lm_head", "embed_tokens")
"""Whole if the vocabulary is not divisible."""
STYLES = ("colwise", "rowwise", "colwise_gather_output", "embedding_rowwise")
PARTIAL_STYLE = "replicated_with_grad_allreduce"
"""Of norms of heads: each rank's gradient covers its own heads. transformers sums it after every backward pass, the
engine once per step.
"""


def split_model(model: PreTrainedModel, mesh: DeviceMesh) -> list[nn.Module]:
    """Split the layers over the mesh; return the modules whose gradients are to be summed over it.

    Raises:
        ValueError: the model can't be split.
    """
    # It warns of every gather over both dimensions of the mesh, in norms and publishing
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    plan: dict[str, str] = dict(model.tp_plan or {})
    config = model.config.get_text_config()
    if obstacle := find_obstacle(config.to_dict(), mesh.size()) or find_unknown_style(config.model_type, plan):
        raise ValueError(f"actor_train.strategy_args.tp_size {mesh.size()}: {obstacle}")
    head = cast(Any, model.get_output_embeddings())
    embeddings = None if head is None else cast(Any, model.get_input_embeddings())  # none on the last of several stages
    is_tied = head is not None and embeddings is not None and head.weight is embeddings.weight
    styles = {
        name: style
        for name, style in plan.items()
        if style in STYLES and (config.vocab_size % mesh.size() == 0 or not name.endswith(EMBEDDINGS))
    }
    adapted = adapted_layers(model)
    for name, module in list(model.named_modules()):
        style = styles.get(replace_layer_number_by_wildcard(name))
        if style is not None:
            for part in _split_parts(module, style) if name in adapted else [module]:
                _split(part, name, ALL_PARALLEL_STYLES[style], mesh)
    if is_tied:
        cast(Any, head).weight = cast(Any, embeddings).weight
    return [
        part
        for name, module in model.named_modules()
        if plan.get(replace_layer_number_by_wildcard(name)) == PARTIAL_STYLE
        for part in module.modules()
    ]


def _split(module: nn.Module, name: str, style: TensorParallelLayer, mesh: DeviceMesh) -> None:
    for parameter, _ in list(module.named_parameters(recurse=False)):
        style.validate_param(module, parameter, mesh, parameter_name=f"{name}.{parameter}")
        style.shard_param(module, parameter, mesh)
    style.install_forward(module, mesh)


def _split_parts(layer: Any, style: str) -> list[nn.Module]:
    """Return what is split of an adapted layer: the base, and the factor of each adapter that has the split dimension.

    The other factor is whole on each rank, with the same gradient, as its input or output is.
    """
    factor = layer.lora_A if style == "rowwise" else layer.lora_B
    return [layer.base_layer, *factor.values()]


def find_unknown_style(model_type: str, plan: Mapping[str, str]) -> str:
    """Return why a plan can't be followed, or ""."""
    if all(name.endswith(EMBEDDINGS) for name in plan):  # as of LFM2, of whose layers there is none
        return f"transformers has no plan for {model_type} (base_model_tp_plan): take 1"
    unknown = sorted(set(plan.values()) - {*STYLES, PARTIAL_STYLE})
    return f"{model_type} needs {', '.join(unknown)}, which is not supported: take 1" if unknown else ""
