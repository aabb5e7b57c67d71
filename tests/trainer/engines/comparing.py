"""What tests of engines compare, and the loss that they train on."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.trainer.engines.base import MIN_LOSS_SCALE, Hyperparameters, StepOutcome, TrainEngine
from offbeat.trainer.models.policy import Sampled
from tests.integration.learner_rank import fixed_batch


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


def assert_offloading_changes_nothing(moved: TrainEngine[Sampled], resident: TrainEngine[Sampled]) -> None:
    for engine in (moved, resident):
        engine.train(fixed_batch(), nll, STEP)
    for _ in range(2):
        moved.offload_states()
        moved.load_states()
        outcomes = [engine.train(fixed_batch(), nll, STEP) for engine in (moved, resident)]
        assert outcomes[0] == outcomes[1]
    assert_same(weights_of(moved), weights_of(resident))


STEP = Hyperparameters(learning_rate=1e-3, weight_decay=0.1)
BEYOND_FLOAT16 = 1e4


def until_applied(engine: TrainEngine[Sampled]) -> StepOutcome:
    """Step until the loss scale is found."""
    outcomes = (engine.train(fixed_batch(), nll, STEP) for _ in range(16))
    return next(outcome for outcome in outcomes if outcome.applied)


def assert_steps_agree(half: TrainEngine[Sampled], full: TrainEngine[Sampled]) -> None:
    """Hold steps in float16 against those in float32, and their weights."""
    norm, expected = until_applied(half).grad_norm, full.train(fixed_batch(), nll, STEP).grad_norm
    assert norm == pytest.approx(expected, rel=1e-2), f"norms of {norm} and {expected}"
    for name, weight in weights_of(half).items():
        assert weight.dtype == torch.float16, name
        torch.testing.assert_close(weight.float(), weights_of(full)[name], rtol=2e-3, atol=2e-3)


def assert_overflow_is_skipped(build: Callable[[], TrainEngine[Sampled]], folder: Path) -> None:
    saved = build()
    before = until_applied(saved).loss_scale
    assert before
    weights = weights_of(saved)
    overflows = [saved.train(fixed_batch(), lambda i, said: nll(i, said) * BEYOND_FLOAT16, STEP) for _ in range(3)]
    assert not overflows[0].applied
    assert overflows[0].overflowed
    assert math.isnan(overflows[0].grad_norm)
    assert_same(weights_of(saved), weights)
    saved.save(folder)
    resumed = build()
    resumed.load(folder)
    after = [each.train(fixed_batch(), nll, STEP) for each in (saved, resumed) for _ in range(2)]
    assert after[:2] == after[2:]  # norms and scales, to the bit
    assert after[0].applied
    assert (after[0].loss_scale or before) < before
    assert_same(weights_of(resumed), weights_of(saved))


def assert_scale_ends_at_one(engine: TrainEngine[Sampled]) -> None:
    outcomes = [engine.train(fixed_batch(), lambda i, said: nll(i, said) * math.nan, STEP) for _ in range(20)]
    assert not any(outcome.applied for outcome in outcomes)
    assert outcomes[0].overflowed
    assert (outcomes[-1].loss_scale, outcomes[-1].overflowed) == (MIN_LOSS_SCALE, False)
    assert engine.train(fixed_batch(), nll, STEP).applied
