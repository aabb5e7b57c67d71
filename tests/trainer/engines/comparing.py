"""What tests of engines compare, and the loss that they train on."""

from typing import Any

import torch
from torch import Tensor

from offbeat.trainer.engines.base import TrainEngine
from offbeat.trainer.models.policy import Sampled


def nll(_: int, said: Sampled) -> Tensor:
    return -said.logprobs.sum() / 6


def weights_of(engine: TrainEngine[Any]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.tensors()}


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor], atol: float = 0.0) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
