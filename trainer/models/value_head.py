"""A scalar read off last hidden states, and how they are had beside the logits of one forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

HEAD = "value_head."
"""What the names of its parameters begin with in a packed model."""


class ValueHead(nn.Linear):
    """One linear layer that says zero before it has learned, and computes in float32 whatever its weights are kept in."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """hidden: [M, H] -> [M], float32 or wider."""
        kind = torch.promote_types(hidden.dtype, torch.float32)
        said = linear(hidden.to(kind), self.weight.to(kind), self.bias.to(kind))
        return said[:, 0].clone()  # no view: FSDP2 hooks into it


@contextmanager
def last_hidden_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Fills the list, with [1, N, H] for each forward pass of the model inside the context."""
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        kept.append(output.last_hidden_state)

    handle = model.base_model.register_forward_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()
