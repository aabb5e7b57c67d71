"""Tiny base model and data of the tests of Tinker's learner."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offbeat.services.tinker.records import Lora
from offbeat.services.tinker.wire import Datum
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import write_tiny_policy
from offbeat.trainer.tinker.adapters import AdapterPool
from offbeat.trainer.tinker.base_model import load_base
from tests.families import write_family

LORA = Lora(rank=4, seed=7)
VOCABULARY = 4 + 3 + 20
LENGTHS = (5, 3, 7)


def make_pool(folder: Path, dtype: str = "float32", family: str = "tiny") -> AdapterPool:
    if family == "tiny":
        write_tiny_policy(folder, TinyPolicyConfig(num_hidden_layers=2), [f"w{i}" for i in range(20)])
    else:
        write_family(folder, family, vocab_size=VOCABULARY)
    return AdapterPool(load_base(folder, ModelArgs.model_validate({"dtype": dtype}), seed=1), folder)


def make_data(names: Sequence[str], lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[Datum]:
    """Return random data with these inputs beside the targets."""
    rng = np.random.default_rng(seed)
    ranges = {"weights": (0.0, 2.0), "logprobs": (-4.0, -2.0), "advantages": (-1.0, 1.0)}
    return [
        Datum(
            rng.integers(0, VOCABULARY, length).astype(np.int32),
            {
                "target_tokens": rng.integers(0, VOCABULARY, length),
                **{name: rng.uniform(*ranges[name], length).astype(np.float32) for name in names},
            },
        )
        for length in lengths
    ]


def randomize(parameters: dict[str, Any], seed: int = 3) -> None:
    """Give both factors weights, since a new adapter's second factor is zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter) * 0.2
