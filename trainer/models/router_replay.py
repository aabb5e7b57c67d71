# pyright: basic
"""Replay of the engine's experts in the learner's mixtures (rollout routing replay, R3, arXiv:2510.11370).

Invariant: a router weighs the experts that it is told by its own logits of them, as it would those of its own choice, so
that the gradient reaches it. Tokens with expert -1 go where the router sends them.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.return_types import topk as TopK
from transformers import PreTrainedModel

from offbeat.trainer.config.router_replay import REPLAYED_FAMILIES

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class _GivenChoice(TorchFunctionMode):
    """Replaces the choice of `top_k` of all experts; a choice of groups of experts before it is left."""

    def __init__(self, num_experts: int, top_k: int, experts: Tensor) -> None:
        super().__init__()
        self._shape = num_experts, top_k
        self._experts = experts
        self.num_choices = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, chosen = args[0], result[1]
        if scores.dim() != 2 or (scores.shape[1], chosen.shape[1]) != self._shape:
            return result
        self.num_choices += 1
        indices = torch.where(self._experts < 0, chosen, self._experts.to(chosen.dtype))
        return TopK((scores.gather(1, indices), indices))


class ReplayedRouter:
    """Router of a layer, whose forward pass it takes the place of.

    experts: [tokens, top_k], -1 where the router chooses; None: it chooses all. Kept until the next pass, as gradient
    checkpointing computes this one again in the backward pass.
    """

    def __init__(self, layer: int, router: Any) -> None:
        self.layer = layer
        self.top_k: int = router.top_k
        self._num_experts: int = router.num_experts
        self._choose = router.forward
        self.experts: Tensor | None = None
        router.forward = self.forward

    def forward(self, hidden_states: Tensor) -> Any:
        if self.experts is None:
            return self._choose(hidden_states)
        with _GivenChoice(self._num_experts, self.top_k, self.experts) as choice:
            outputs = self._choose(hidden_states)
        if choice.num_choices != 1:
            raise RuntimeError(f"a router of layer {self.layer} made {choice.num_choices} choices of experts, not one")
        return outputs


class RouterReplay:
    """Routers of a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ValueError for a family whose routers can't be told what to choose."""
        config = model.config.get_text_config()
        model_type = config.model_type
        if model_type not in REPLAYED_FAMILIES:
            raise ValueError(
                f"router_replay is not supported for {model_type}, only for {', '.join(REPLAYED_FAMILIES)}"
            )
        self._num_layers: int = config.num_hidden_layers
        self._routers = [ReplayedRouter(layer, router) for layer, router in _find_routers(model)]
        if not self._routers:
            raise ValueError("router_replay: the model has no routers of experts")

    def set(self, routing: Tensor | None) -> None:
        """Tell the next forward pass its tokens' experts, [N, layers, top_k]; None: routers choose.

        Raises:
            ValueError: they are of another model.
        """
        if routing is not None:
            expected = self._num_layers, self._routers[0].top_k
            if routing.shape[1:] != expected:
                raise ValueError(
                    f"the engine's experts are of shape {list(routing.shape[1:])}, the model's [layers, top_k] is "
                    f"{list(expected)}"
                )
        for router in self._routers:
            router.experts = None if routing is None else routing[:, router.layer]


def _find_routers(model: nn.Module) -> Iterator[tuple[int, Any]]:
    for name, module in model.named_modules():
        if (layer := LAYER.search(name)) and type(module).__name__.lower().endswith("topkrouter"):
            yield int(layer[1]), module
