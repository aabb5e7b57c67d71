"""A pass that several models share: their gradients are those of their own passes, and it is repeated to the bit."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from offbeat.services.tinker.records import Lora, SharedPass
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.tinker.adapters import AdapterPool
from offbeat.trainer.tinker.base_model import load_base
from offbeat.trainer.tinker.client_model import ClientModel, Scores
from offbeat.trainer.tinker.losses import LOSSES
from offbeat.trainer.tinker.shared_pass import GradientBatch, compute_shared, record_shared, repeat_shared
from tests.trainer.tinker.tiny_base import make_data, make_pool, randomize

LORAS = (
    Lora(rank=4, seed=1),
    Lora(rank=2, seed=2, train_mlp=False),
    Lora(rank=8, seed=3, train_unembed=False),
    Lora(rank=1, seed=4, train_attn=False),
)
LENGTHS = ((5, 3, 7), (31,), (2, 17, 4, 9, 3), (8, 8))
LOSS_NAMES = ("cross_entropy", "ppo", "dro", "importance_sampling")
FLOAT_NOISE = 1e-4
Gradients = dict[str, torch.Tensor]


@pytest.fixture
def pool(tmp_path: Path) -> AdapterPool:
    return make_pool(tmp_path / "base")


def make_batches(pool: AdapterPool, count: int = len(LORAS)) -> list[GradientBatch]:
    batches: list[GradientBatch] = []
    for i, (lora, lengths, name) in enumerate(zip(LORAS, LENGTHS, LOSS_NAMES, strict=True)):
        model, loss = ClientModel(pool, lora), LOSSES[name]
        randomize(model.parameters, seed=i)
        for parameter in model.parameters.values():
            parameter.data *= 0.25
        batches.append(GradientBatch(model, make_data(loss.inputs, lengths, seed=i), loss, dict(loss.defaults or {})))
    return batches[:count]


def take_gradients(batches: Sequence[GradientBatch]) -> list[Gradients]:
    taken = [{n: p.grad for n, p in each.model.parameters.items() if p.grad is not None} for each in batches]
    for batch in batches:
        for parameter in batch.model.parameters.values():
            parameter.grad = None
    return taken


def alone(batch: GradientBatch) -> Scores:
    return batch.model.compute(batch.data, batch.loss, batch.settings, backward=True, max_tokens=1000)


def are_equal(one: Gradients, other: Gradients) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_shared_pass_gives_the_gradients_of_single_ones(pool: AdapterPool) -> None:
    batches = make_batches(pool)
    own = [alone(each) for each in batches]
    expected = take_gradients(batches)
    shared = compute_shared(pool, batches)
    for a, b in zip(shared, own, strict=True):
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            np.testing.assert_allclose(x, y, atol=FLOAT_NOISE)
    for gradients, theirs in zip(take_gradients(batches), expected, strict=True):
        assert gradients.keys() == theirs.keys()
        for name, gradient in gradients.items():
            assert (gradient - theirs[name]).abs().max() <= FLOAT_NOISE * theirs[name].abs().max()
    assert all(each.model.accumulated.num_sequences == 2 * len(each.data) for each in batches)


def test_a_shared_pass_is_repeated_to_the_bit(pool: AdapterPool) -> None:
    """By each model without the others. Their own passes differ, so the record is needed."""
    batches = make_batches(pool)
    for batch in batches:
        alone(batch)
    single = take_gradients(batches)
    shared = compute_shared(pool, batches)
    gradients = take_gradients(batches)
    for i, recorded in enumerate(record_shared(batches)):
        scores = repeat_shared(pool, batches[i], recorded)
        assert scores.loss == shared[i].loss
        assert are_equal(*take_gradients(batches[i : i + 1]), gradients[i])
    assert not all(map(are_equal, single, gradients))


def test_a_shared_pass_adds_to_earlier_gradients(pool: AdapterPool) -> None:
    batches = make_batches(pool, 2)
    compute_shared(pool, batches)
    once = take_gradients(batches)
    for _ in range(2):
        compute_shared(pool, batches)
    for gradients, single in zip(take_gradients(batches), once, strict=True):
        assert are_equal(gradients, {name: each + each for name, each in single.items()})


def test_a_failed_shared_pass_changes_nothing(pool: AdapterPool) -> None:
    batches = make_batches(pool, 2)
    broken = GradientBatch(batches[1].model, make_data(("weights",), (4,)), LOSSES["ppo"], {})
    compute_shared(pool, batches)
    before = [{n: p.grad for n, p in each.model.parameters.items() if p.grad is not None} for each in batches]
    with pytest.raises(KeyError):
        compute_shared(pool, [batches[0], broken])
    assert all(map(are_equal, take_gradients(batches), before))
    assert batches[0].model.accumulated.num_sequences == len(batches[0].data)


def test_a_record_has_the_lengths_around(pool: AdapterPool) -> None:
    records = record_shared(make_batches(pool, 3))
    assert records[1] == SharedPass(before=[5, 3, 7], after=[2, 17, 4, 9, 3])
    assert (records[0].before, records[2].after) == ([], [])


def test_activations_of_a_shared_pass_are_not_recomputed(tmp_path: Path) -> None:
    """Its adapters are in the forward pass alone, so that a recomputed one would differ."""
    make_pool(tmp_path / "base")
    args = ModelArgs(disable_gradient_checkpointing=False)
    pool = AdapterPool(load_base(tmp_path / "base", args, seed=1), tmp_path / "base")
    batches = make_batches(pool, 2)
    compute_shared(pool, batches)
    gradients = take_gradients(batches)
    for batch in batches:
        alone(batch)
    for mine, own in zip(gradients, take_gradients(batches), strict=True):
        assert all((mine[name] - own[name]).abs().max() <= FLOAT_NOISE * own[name].abs().max() for name in own)
