# pyright: basic
"""Pipeline stages of a model, cut by decoder layers after transformers' plan (`base_model_pp_plan`).

Invariant: a stage's parameters have their names in the whole model; those of tied embeddings exist on the first and the
last stage.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.trainer.config.model_split import find_stage_obstacle
from offbeat.trainer.models.packing import PackedInput, Packing
from offbeat.trainer.models.policy import model_input, packed_kwargs

PLAN = {"embed_tokens", "layers", "norm"}
"""Modules of plans that are followed."""


class PassThrough(nn.Module):
    """Decoder layer or norm of another stage."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.attention_type = getattr(replaced, "attention_type", None)  # some models choose the layer's mask by it

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class PackedStage(nn.Module):
    """Stage before the last one."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: PackedInput) -> Tensor:
        """Return the hidden states [1, N, H] for the next stage."""
        return self.model.base_model(**model_input(x), **packed_kwargs(x.packing)).last_hidden_state


def cut_stage(module: nn.Module, stage: int, num_stages: int) -> nn.Module:
    """Return one stage of a policy, critic or reward model, which gives up the layers of others.

    The last stage is the module itself, with norm, output layer and value head.

    Raises:
        ValueError: the model can't be cut so.
    """
    model = cast(PreTrainedModel, module.model)
    base: Any = model.base_model
    config = model.config.get_text_config()
    if obstacle := find_stage_obstacle(config.to_dict(), num_stages) or _find_unknown_plan(model):
        raise ValueError(f"actor_train.strategy_args.pp_size {num_stages}: {obstacle}")
    layers, norm, is_last = list(base.layers), base.norm, stage == num_stages - 1
    if obstacle := _find_untrained_stage(layers, num_stages):
        raise ValueError(f"actor_train.strategy_args.pp_size {num_stages}: {obstacle}")
    base.norm = PassThrough(norm)
    for i, layer in enumerate(layers):
        base.layers[i] = PassThrough(layer)
    if not _passes_embeddings_through(base):
        raise ValueError(
            f"actor_train.strategy_args.pp_size {num_stages}: {config.model_type} changes hidden states between its layers, "
            "which stages would repeat: take 1"
        )
    for i in stage_layers(len(layers), stage, num_stages):
        base.layers[i] = layers[i]
    head = model.get_output_embeddings()
    is_tied = head is not None and cast(Any, head).weight is base.embed_tokens.weight
    if stage > 0 and not (is_tied and is_last):
        base.embed_tokens = None
    if is_last:
        base.norm = norm
        return module
    for name, child in list(model.named_children()) if base is not model else ():
        if child is not base:  # heads
            setattr(model, name, None)
    return PackedStage(model)


def stage_layers(num_layers: int, stage: int, num_stages: int) -> range:
    """Return the layers of a stage: as many for each, the rest on the first ones."""
    start, end = (-(-each * num_layers // num_stages) for each in (stage, stage + 1))
    return range(start, end)


def _find_unknown_plan(model: PreTrainedModel) -> str:
    """Return why a model's plan can't be followed, or ""."""
    kind, plan = model.config.model_type, cast(Any, model.base_model).config.base_model_pp_plan
    if not plan:
        return f"transformers has no plan for {kind} (base_model_pp_plan): take 1"
    unknown = sorted(set(plan).symmetric_difference(PLAN))
    return f"the plan for {kind} differs in {', '.join(unknown)}, which is not supported: take 1" if unknown else ""


def _find_untrained_stage(layers: Sequence[nn.Module], num_stages: int) -> str:
    """Return which layers have nothing to train, as no gradient would leave their stage, or ""."""
    for stage in range(num_stages):
        numbers = stage_layers(len(layers), stage, num_stages)
        if not any(parameter.requires_grad for i in numbers for parameter in layers[i].parameters()):
            return (
                f"lora_target names nothing in layers {numbers[0]} to {numbers[-1]}, stage {stage}: name layers of each "
                "stage, set all-linear, or take 1"
            )
    return ""


@torch.no_grad()
def _passes_embeddings_through(base: PreTrainedModel) -> bool:
    """Return whether a model without layers and norm returns its embeddings unchanged."""
    packing = Packing.of(torch.tensor([0, 2], device=base.device))
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(1, 2, base.config.hidden_size, generator=generator).to(base.device, base.dtype)
    return torch.equal(base(inputs_embeds=embeddings, **packed_kwargs(packing)).last_hidden_state, embeddings)
