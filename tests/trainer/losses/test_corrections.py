"""Corrections as configured, against a loop over turns and sequences, and their gauges."""

import math

import pytest
import torch

from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.corrections import ImportanceWeight, MismatchFilter, TrainInferCorrection
from offbeat.trainer.data.batch import pack
from offbeat.trainer.losses.corrections import correct
from offbeat.trainer.losses.targets import build_targets
from tests.trainer.outcome import (
    by_token,
    inputs_of,
    outcome,
    rich_groups,
)

UNITS = ["token", "turn", "geometric", "sequence"]


def units_of(batch, unit: str) -> list[list[int]]:
    """Places of the tokens that are judged together."""
    keys = {"token": range(batch.num_sampled), "turn": batch.turn.tolist()}.get(unit, batch.sequence.tolist())
    by_unit: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        by_unit.setdefault(key, []).append(place)
    return list(by_unit.values())


@pytest.mark.parametrize("unit", UNITS)
def test_units_outside_bounds_are_masked_entirely(unit: str):
    config = AlgorithmConfig(old_logprobs="recompute")
    batch = pack(rich_groups())
    targets = build_targets(batch, config, **inputs_of(batch, config))
    bounds = {"ratio_low": 0.9, "ratio_high": 1.15}, {"diff_low": -0.1, "diff_high": 0.08}, {"binary_kl_high": 0.015}
    for bound in bounds:
        correction = TrainInferCorrection(filters=(MismatchFilter(agg_type=unit, **bound),))
        kept = correct(correction, targets.old_logprobs, targets).kept
        assert kept is not None
        for places in units_of(batch, unit):
            new, old = targets.old_logprobs[places].double(), targets.behavior_logprobs[places].double()
            p, q = new.exp(), old.exp()
            match list(bound):
                case ["ratio_low", "ratio_high"]:
                    values, low, high = new - old, math.log(0.9), math.log(1.15)
                case ["diff_low", "diff_high"]:
                    values, low, high = p - q, -0.1, 0.08
                case _:
                    forward = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
                    backward = q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
                    values, low, high = torch.maximum(forward, backward), -1.0, 0.015
            judged = float(values.sum() if unit == "sequence" else values.mean())
            assert kept[places].tolist() == [low <= judged <= high] * len(places)
        assert int(kept.sum()) < len(kept)


@pytest.mark.parametrize("unit", UNITS)
def test_weights_are_unit_ratios_within_bounds(unit: str):
    config = AlgorithmConfig(old_logprobs="recompute")
    batch = pack(rich_groups())
    targets = build_targets(batch, config, **inputs_of(batch, config))
    bounds = ImportanceWeight(weight_type=unit, lower_bound=0.9, upper_bound=1.1)
    got = correct(TrainInferCorrection(is_weight=bounds), targets.old_logprobs, targets)
    assert got.weight is not None
    for places in units_of(batch, unit):
        gap = (targets.old_logprobs - targets.behavior_logprobs)[places]
        ratio = math.exp(float(gap.sum() if unit == "sequence" else gap.mean()))
        assert got.weight[places].tolist() == pytest.approx([min(max(ratio, 0.9), 1.1)] * len(places), rel=1e-5)


def test_masked_tokens_keep_denominator_and_entropy():
    plain, filtered = AlgorithmConfig(entropy_loss_coef=0.1), MismatchFilter(ratio_high=1.1)
    corrected = AlgorithmConfig(entropy_loss_coef=0.1, train_infer_correction=TrainInferCorrection(filters=(filtered,)))
    one, two = outcome(plain), outcome(corrected)
    gone = by_token(one.batch, 0.4, 0.0).exp() > 1.1
    expected = one.gradient.masked_fill(gone, 0.0)
    torch.testing.assert_close(two.gradient, expected)
    assert torch.equal(one.entropy_gradient, two.entropy_gradient)
    up = one.targets.advantages > 0
    assert two.gauges["actor/maskfrac"] == pytest.approx(float(gone.float().mean()))
    assert two.gauges["actor/maskfrac_up"] == pytest.approx(float(gone[up].float().mean()))


def test_weight_gauges_report_mean_and_clipped_share():
    weight = TrainInferCorrection(is_weight=ImportanceWeight(upper_bound=1.1))
    got = outcome(AlgorithmConfig(old_logprobs="recompute", train_infer_correction=weight))
    ratio = (got.targets.old_logprobs - got.targets.behavior_logprobs).exp()
    assert got.gauges["actor/correction_weight"] == pytest.approx(float(ratio.clamp(max=1.1).mean()), rel=1e-5)
    assert got.gauges["actor/correction_clipfrac"] == pytest.approx(float((ratio > 1.1).float().mean()))


@pytest.mark.parametrize("unit", UNITS)
def test_mask_gauges_are_token_shares_by_advantage_sign(unit: str):
    bound = MismatchFilter(agg_type=unit, ratio_low=0.9, ratio_high=1.15)
    weight = ImportanceWeight(weight_type=unit, lower_bound=0.9, upper_bound=1.1)
    correction = TrainInferCorrection(filters=(bound,), is_weight=weight)
    got = outcome(AlgorithmConfig(old_logprobs="recompute", train_infer_correction=correction))
    dropped, cut, weights = 0, 0, 0.0
    by_sign = {1: [0, 0], -1: [0, 0]}
    for places in units_of(got.batch, unit):
        gap = (got.targets.old_logprobs - got.targets.behavior_logprobs)[places].double()
        ratio = math.exp(float(gap.sum() if unit == "sequence" else gap.mean()))
        gone = not 0.9 <= ratio <= 1.15
        dropped += gone * len(places)
        cut += (not 0.9 <= ratio <= 1.1) * len(places)
        weights += min(max(ratio, 0.9), 1.1) * len(places)
        for sign, counts in by_sign.items():
            its = int((got.targets.advantages[places] * sign > 0).sum())
            counts[0] += gone * its
            counts[1] += its
    count = got.batch.num_sampled
    assert 0 < dropped < count
    expected = {
        "actor/maskfrac": dropped / count,
        "actor/maskfrac_up": by_sign[1][0] / by_sign[1][1],
        "actor/maskfrac_down": by_sign[-1][0] / by_sign[-1][1],
        "actor/correction_weight": weights / count,
        "actor/correction_clipfrac": cut / count,
    }
    assert {name: got.gauges[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_m2po_masked_tokens_are_counted():
    got = outcome(
        AlgorithmConfig(old_logprobs="recompute", train_infer_correction=TrainInferCorrection(m2_threshold=0.01))
    )
    square = (got.targets.old_logprobs - got.targets.behavior_logprobs).double().square()
    kept = square.sort().values
    while float(kept.mean()) > 0.01:
        kept = kept[:-1]
    assert 0 < len(kept) < len(square)
    assert got.gauges["actor/maskfrac"] == pytest.approx(1 - len(kept) / len(square))


def test_proximal_policy_is_interpolated_by_version():
    got = outcome(AlgorithmConfig(old_logprobs="loglinear"))
    age = 4 - got.batch.versions
    moved = by_token(got.batch, 0.4, 0.0)
    ratio = (moved * (1 - age / (age + 1.0))).exp()
    weight = got.targets.weights * -got.targets.advantages
    low, high = (ratio < 0.8) & (weight > 0), (ratio > 1.2) & (weight < 0)
    torch.testing.assert_close(got.gradient, (weight * ratio).masked_fill(low | high, 0.0))
