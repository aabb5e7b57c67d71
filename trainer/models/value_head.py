from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

HEAD = "value_head."
"""Parameter prefix."""


class ValueHead(nn.Linear):
    """Linear layer, initially zero, in float32 or wider."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        values = linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype))
        return values[:, 0].clone()  # not a view, because FSDP2 hooks into it


@contextmanager
def last_hidden_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Yield a list that receives each forward pass's last hidden states [1, N, H]."""
    states: list[Tensor] = []

    def capture(_module: nn.Module, _inputs: Any, output: Any) -> None:
        states.append(output.last_hidden_state)

    handle = model.base_model.register_forward_hook(capture)
    try:
        yield states
    finally:
        handle.remove()
