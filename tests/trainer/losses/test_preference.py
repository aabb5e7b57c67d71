"""Preference losses against a plain loop in float64, with gradients, and over packed micro-batches."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.services.telemetry import merge_all
from offbeat.trainer.algorithms.preference import PairLogprobs, PreferenceTerms, orpo
from offbeat.trainer.config.preference import PreferenceConfig
from offbeat.trainer.data.batch import MicroBatch, group_minibatches, pack, sequences_by_group
from offbeat.trainer.data.prefix_trees import whole_group_microbatches
from offbeat.trainer.losses.preference import PreferenceLosses
from offbeat.trainer.models.policy import Sampled
from tests.trainer.trajectories import group, trajectory

GROUPS = [group(n, trajectory(0, [(9, 1 + n, 0.0)]), trajectory(1, [(9, 3 + n % 2, 0.0)], base=0)) for n in range(4)]
BATCH = pack(GROUPS)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _log_sigmoid(x: float) -> float:
    return math.log(_sigmoid(x))


Pair = tuple[float, float, float, float]
"""Chosen and rejected under the policy, then under the reference."""


def _margin(p: Pair) -> float:
    return (p[0] - p[2]) - (p[1] - p[3])


def _odds(logprob: float) -> float:
    return math.exp(logprob) / (1 - math.exp(logprob))


FORMULAS: dict[str, tuple[dict[str, Any], Callable[[Pair], float]]] = {
    "sigmoid": ({"beta": 0.3}, lambda p: -_log_sigmoid(0.3 * _margin(p))),
    "cdpo": (
        {"beta": 0.3, "label_smoothing": 0.1},
        lambda p: -0.9 * _log_sigmoid(0.3 * _margin(p)) - 0.1 * _log_sigmoid(-0.3 * _margin(p)),
    ),
    "robust": (
        {"loss_type": "robust", "label_smoothing": 0.1},
        lambda p: (-0.9 * _log_sigmoid(0.1 * _margin(p)) + 0.1 * _log_sigmoid(-0.1 * _margin(p))) / 0.8,
    ),
    "hinge": ({"loss_type": "hinge", "beta": 0.5}, lambda p: max(0.0, 1 - 0.5 * _margin(p))),
    "ipo": ({"loss_type": "ipo", "beta": 0.2}, lambda p: (_margin(p) - 2.5) ** 2),
    "simpo": (
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.7},
        lambda p: -_log_sigmoid(2.0 * (p[0] - p[1]) - 0.7),
    ),
    "orpo": (
        {"loss_type": "orpo", "beta": 0.2},
        lambda p: -p[0] - 0.2 * _log_sigmoid(math.log(_odds(p[0]) / _odds(p[1]))),
    ),
    "apo_zero": (
        {"loss_type": "apo_zero"},
        lambda p: 1 - _sigmoid(0.1 * (p[0] - p[2])) + _sigmoid(0.1 * (p[1] - p[3])),
    ),
    "apo_down": (
        {"loss_type": "apo_down"},
        lambda p: _sigmoid(0.1 * (p[0] - p[2])) + 1 - _sigmoid(0.1 * _margin(p)),
    ),
    "reference-free": ({"reference_free": True}, lambda p: -_log_sigmoid(0.1 * (p[0] - p[1]))),
    "normalized": ({"length_normalization": True, "beta": 3.0}, lambda p: -_log_sigmoid(3.0 * _margin(p))),
}


def random_logprobs(seed: int) -> Tensor:
    return -torch.rand(BATCH.num_sampled, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.05


def plain_loss(
    logprobs: list[float], reference: list[float], config: PreferenceConfig, of: Callable[[Pair], float]
) -> float:
    """The mean over pairs, token by token."""
    total = 0.0
    for number in range(len(GROUPS)):
        sums = [0.0] * 4
        counts = [0, 0]
        for token, owner in enumerate(BATCH.trajectory.tolist()):
            if owner // 2 == number:
                sums[owner % 2] += logprobs[token]
                sums[2 + owner % 2] += 0.0 if config.reference_free else reference[token]
                counts[owner % 2] += 1
        if config.takes_means:
            sums = [value / counts[i % 2] for i, value in enumerate(sums)]
        total += of((sums[0], sums[1], sums[2], sums[3]))
    return total / len(GROUPS)


def make_losses(
    config: PreferenceConfig, reference: Tensor | None, micro: list[MicroBatch] | None = None
) -> PreferenceLosses:
    num_chosen = int((BATCH.trajectory % 2 == 0).sum())
    return PreferenceLosses(config, BATCH, micro or [], len(GROUPS), num_chosen, reference)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_preference_loss_and_its_gradient_equal_a_plain_loop(name: str):
    settings, formula = FORMULAS[name]
    config = PreferenceConfig(**settings)
    logprobs, reference = random_logprobs(1).requires_grad_(), random_logprobs(2)
    used = reference if config.needs_reference else None
    loss, _ = make_losses(config, used).of_logprobs(logprobs, used, BATCH.trajectory)
    loss.backward()
    loss = loss.detach()
    values, others = logprobs.tolist(), reference.tolist()
    assert float(loss) == pytest.approx(plain_loss(values, others, config, formula), rel=1e-10)
    assert logprobs.grad is not None
    for i in range(BATCH.num_sampled):
        moved = [[v + (step if j == i else 0.0) for j, v in enumerate(values)] for step in (1e-6, -1e-6)]
        ends = [plain_loss(each, others, config, formula) for each in moved]
        assert float(logprobs.grad[i]) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orpo_has_finite_gradients_of_probabilities_that_round_to_one(dtype: torch.dtype):
    chosen = torch.tensor([0.0, -1.0, 0.0, -0.5], dtype=dtype, requires_grad=True)
    rejected = torch.tensor([-1.0, 0.0, 0.0, -0.7], dtype=dtype, requires_grad=True)
    reference = torch.zeros(4, dtype=dtype)
    losses = orpo(PairLogprobs(chosen, rejected, reference, reference), PreferenceTerms(beta=0.1))
    losses.sum().backward()
    assert losses.isfinite().all()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.isfinite().all()
    assert rejected.grad.isfinite().all()
    assert losses[0] < 1e-6, "the chosen response can't become more likely"


def test_the_sft_term_is_the_chosen_responses_likelihood():
    logprobs, reference = random_logprobs(1), random_logprobs(2)
    plain, _ = make_losses(PreferenceConfig(), reference).of_logprobs(logprobs, reference, BATCH.trajectory)
    config = PreferenceConfig(sft_coef=0.5)
    both, gauges = make_losses(config, reference).of_logprobs(logprobs, reference, BATCH.trajectory)
    chosen = logprobs[BATCH.trajectory % 2 == 0]
    assert float(both - plain) == pytest.approx(-0.5 * float(chosen.mean()))
    assert gauges["sft_loss"].value == pytest.approx(-float(chosen.mean()))


def test_rewards_are_beta_times_the_log_ratios():
    logprobs, reference = random_logprobs(1), random_logprobs(2)
    config = PreferenceConfig(beta=0.5)
    _, gauges = make_losses(config, reference).of_logprobs(logprobs, reference, BATCH.trajectory)
    ratios = torch.zeros(8, dtype=torch.float64).index_add(0, BATCH.trajectory, logprobs - reference)
    assert gauges["rewards/chosen"].value == pytest.approx(0.5 * float(ratios[::2].mean()))
    assert gauges["rewards/rejected"].value == pytest.approx(0.5 * float(ratios[1::2].mean()))
    assert gauges["rewards/margins"].value == pytest.approx(0.5 * float((ratios[::2] - ratios[1::2]).mean()))
    assert gauges["rewards/accuracies"].value == pytest.approx(float((ratios[::2] > ratios[1::2]).double().mean()))


@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 40, 1000])
def test_micro_batches_of_whole_pairs_sum_to_the_batchs_loss(share_prefix: bool, max_tokens: int):
    logprobs, reference, config = random_logprobs(1), random_logprobs(2), PreferenceConfig(sft_coef=0.1)
    whole, _ = make_losses(config, reference).of_logprobs(logprobs, reference, BATCH.trajectory)
    micro = whole_group_microbatches(BATCH, range(8), max_tokens, share_prefix=share_prefix)
    losses = make_losses(config, reference, micro)
    outputs = [Sampled(logprobs[part.index], logprobs[part.index]) for part in micro]
    total = sum(float(losses.of_policy(i, output)) for i, output in enumerate(outputs))
    assert total == pytest.approx(float(whole))
    assert merge_all(losses.gauges)["rewards/accuracies"].count == len(GROUPS)
    for part in micro:
        assert torch.equal(part.tokens[part.positions], BATCH.tokens[BATCH.positions[part.index]])
    num_computed = sum(len(part.tokens) for part in micro)
    rows = [BATCH.tokens[start:end].tolist() for start, end in pairwise(BATCH.cu_seqlens.tolist())]
    pairs = {(i // 2, tuple(row[: n + 1])) for i, row in enumerate(rows) for n in range(len(row))}
    assert num_computed == (len(pairs) if share_prefix else BATCH.num_tokens)


def test_a_pair_in_two_micro_batches_is_refused():
    logprobs, chosen = random_logprobs(1), BATCH.trajectory % 2 == 0
    with pytest.raises(ValueError, match="different micro-batches"):
        make_losses(PreferenceConfig(), logprobs).of_logprobs(logprobs[chosen], None, BATCH.trajectory[chosen])


def test_minibatches_hold_whole_groups():
    assert sequences_by_group(BATCH) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert group_minibatches(BATCH, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert group_minibatches(BATCH, 3) == [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert len(group_minibatches(BATCH, 9)) == 4
