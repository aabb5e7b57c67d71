"""What tests of engines compare, and the loss that they train on."""

from typing import Any

import torch
from torch import Tensor, nn

from offbeat.trainer.engines.base import TrainEngine
from offbeat.trainer.models.policy import Sampled


def nll(_: int, said: Sampled) -> Tensor:
    return -said.logprobs.sum() / 6


def weights_of(engine: TrainEngine[Any]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.tensors()}


def decaying_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for torch's AdamW: norms, biases and embeddings do not decay."""
    exempt = {name for name, _ in model.named_parameters() if "norm" in name or "bias" in name or "embed" in name}
    return [
        {"params": [p for name, p in model.named_parameters() if name not in exempt], "weight_decay": weight_decay},
        {"params": [p for name, p in model.named_parameters() if name in exempt], "weight_decay": 0.0},
    ]


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor], atol: float = 0.0) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
