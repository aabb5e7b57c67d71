"""Recurrent layers over packed tokens: linear attention, short convolutions, Mamba.

Invariant: a layer computes each sequence as alone. Sequences are padded with zeros on their right, which nothing before
them depends on, so that this holds for any kernel.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from offbeat.trainer.models.gated_delta import compute_by_heads
from offbeat.trainer.models.packing import Packing, pad, unpad

RECURRENT_LAYERS = {
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "bamba": "BambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "nemotron_h": "NemotronHMamba2Mixer",
}
"""Classes of the recurrent layers of each family of language models that is supported."""


class PackedRecurrentLayer:
    """Mixin before a recurrent layer's class. packing: of the next forward pass; None for a batch."""

    packing: Packing | None = None

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Pass hidden states by position and with a gradient, without which hooks of ZeRO-3 run before the backward pass."""
        is_trained = any(parameter.requires_grad for parameter in cast(nn.Module, self).parameters())
        if is_trained and torch.is_grad_enabled() and not hidden_states.requires_grad:
            hidden_states = hidden_states.detach().requires_grad_()
        return super().__call__(hidden_states, *args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute each sequence as alone: [1, N, H] -> [1, N, H].

        Raises:
            NotImplementedError: blocks of a shared prefix.
        """
        compute: Any = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if self.packing is None:
            return compute(hidden_states, *args, **kwargs)
        if self.packing.tree is not None:
            raise NotImplementedError(
                f"{type(self).__name__} is recurrent: set actor_train.model_args.shared_prefix to false"
            )
        if self.packing.shard is not None:
            return compute_by_heads(self, compute.__func__, hidden_states, self.packing)
        self.training = False  # in training Mamba's fused kernel reads out_proj's weight past its adapter
        return unpad([compute(rows) for rows in pad(hidden_states[0], self.packing)], self.packing)[None]


def pack_recurrent_layers(model: nn.Module, family: str) -> None:
    """Let the model's recurrent layers take packed sequences. family: `model_type` of the language model."""
    for module in list(model.modules()):
        mixers = [child for child in module.children() if type(child).__name__ == RECURRENT_LAYERS.get(family)]
        for mixer in mixers:
            mixer.__class__ = type(type(mixer).__name__, (PackedRecurrentLayer, type(mixer)), {})
        if mixers:  # of the layer, as some layers do not pass it on; it is called again for gradient checkpointing
            module.register_forward_pre_hook(_pass_packing, with_kwargs=True)


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that take packed sequences."""
    return [module for module in model.modules() if isinstance(module, PackedRecurrentLayer)]


def _pass_packing(layer: nn.Module, _: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for child in layer.children():
        if isinstance(child, PackedRecurrentLayer):
            child.packing = kwargs.get("packing")
