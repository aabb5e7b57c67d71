"""Gradients of several LoRA tenants: a pass of the base model for each, against one that they share.

python -m offbeat.benchmarks.studies.tenant_passes [--model tiny smollm2] [--tenants 2 4 8] [--sequences 1 8] [--tokens 32]

CPU time on one thread; ways alternate. Both ways are compared to the bit.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.benchmarks.harness.result import Spread, show
from offbeat.benchmarks.turn.smollm2 import smollm2_config
from offbeat.services.tinker.records import Lora
from offbeat.services.tinker.wire import Datum
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import write_tiny_policy
from offbeat.trainer.tinker.adapters import AdapterPool
from offbeat.trainer.tinker.base_model import load_base
from offbeat.trainer.tinker.client_model import ClientModel, Scores
from offbeat.trainer.tinker.losses import TARGETS, find_loss
from offbeat.trainer.tinker.shared_pass import GradientBatch, compute_shared

RANK = 32
"""tinker-cookbook's default."""
MODELS = "tiny", "smollm2"
MAX_TOKENS = 8192
COLUMNS = "base model", "sequences", "tenants", "tokens", "tokens/s alone", "x faster", "least", "greatest", "equal"


@dataclass(frozen=True, slots=True)
class PassResult:
    """Losses, and gradients by parameter, of each tenant."""

    seconds: float
    losses: list[float]
    gradients: list[dict[str, Tensor]]

    def equals(self, other: "PassResult") -> bool:
        pairs = zip(self.gradients, other.gradients, strict=True)
        return self.losses == other.losses and all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)


class TenantPasses:
    """k tenants with a batch each on one base model."""

    def __init__(self, folder: Path, k: int, sequences: int, tokens: int) -> None:
        self._pool = AdapterPool(load_base(folder, ModelArgs(), seed=0), folder)
        draw = np.random.default_rng(k)
        self._batches = [self._batch(seed, self._draw(draw, sequences, tokens)) for seed in range(k)]
        self.num_tokens = sum(each.num_tokens for each in self._batches)

    def alone(self) -> PassResult:
        return self._measure(lambda: [self._compute(each) for each in self._batches])

    def shared(self) -> PassResult:
        return self._measure(lambda: compute_shared(self._pool, self._batches))

    def _measure(self, compute: Callable[[], list[Scores]]) -> PassResult:
        began = time.process_time()
        scores = compute()
        seconds = time.process_time() - began
        parameters = [each.model.parameters for each in self._batches]
        gradients = [{name: each.grad for name, each in own.items() if each.grad is not None} for own in parameters]
        for parameter in itertools.chain.from_iterable(own.values() for own in parameters):
            parameter.grad = None
        return PassResult(seconds, [each.loss for each in scores], gradients)

    @staticmethod
    def _compute(batch: GradientBatch) -> Scores:
        return batch.model.compute(batch.data, batch.loss, batch.settings, backward=True, max_tokens=MAX_TOKENS)

    def _batch(self, seed: int, data: Sequence[Datum]) -> GradientBatch:
        model = ClientModel(self._pool, Lora(rank=RANK, seed=seed))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.parameters.items():
            if ".lora_B." in name:  # zero at first: the other factor would have no gradient
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.02
        return GradientBatch(model, data, find_loss("cross_entropy"), {})

    def _draw(self, draw: np.random.Generator, sequences: int, tokens: int) -> list[Datum]:
        lengths = draw.integers(tokens // 2, tokens + 1, sequences)
        words = [draw.integers(0, self._pool.vocab_size, length + 1) for length in lengths]
        return [
            Datum(each[:-1].astype(np.int32), {TARGETS: each[1:], "weights": np.ones(len(each) - 1, np.float32)})
            for each in words
        ]


def write_base(name: str, folder: Path) -> None:
    """Write a configuration; the weights are drawn when it is loaded."""
    if name == "smollm2":
        smollm2_config().save_pretrained(folder)
    else:
        write_tiny_policy(folder, TinyPolicyConfig(), [f"w{i}" for i in range(20)])


def measure(folder: Path, sequences: int, k: int, options: argparse.Namespace) -> tuple[Any, ...]:
    """Return the columns after the base model's."""
    passes = TenantPasses(folder, k, sequences, options.tokens)
    is_equal = passes.alone().equals(passes.shared())  # warms up
    alone: list[float] = []
    shared: list[float] = []
    ways = (passes.alone, alone), (passes.shared, shared)
    for number in range(options.rounds):
        for compute, seconds in ways if number % 2 else reversed(ways):
            seconds.append(compute().seconds)
    gain = Spread.of(a / b for a, b in zip(alone, shared, strict=True))
    speed = passes.num_tokens / Spread.of(alone).median
    return sequences, k, passes.num_tokens, speed, gain.median, gain.low, gain.high, "yes" if is_equal else "no"


def main() -> None:
    parser = argparse.ArgumentParser(description="Shared passes of LoRA tenants.")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--tenants", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8], help="of a tenant")
    parser.add_argument("--tokens", type=int, default=32, help="of the longest sequence; the shortest has half")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[tuple[Any, ...]] = []
    with tempfile.TemporaryDirectory(prefix="offbeat-study-") as folder:
        for name in options.model:
            write_base(name, Path(folder) / name)
            for sequences, k in itertools.product(options.sequences, options.tenants):
                rows.append((name, *measure(Path(folder) / name, sequences, k, options)))
    show(f"Shared passes, sequences of {options.tokens // 2} to {options.tokens} tokens, rank {RANK}", COLUMNS, rows)


if __name__ == "__main__":
    main()
