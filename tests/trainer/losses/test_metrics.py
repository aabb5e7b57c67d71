import math

import pytest
import torch

from offbeat.services.messages.types import StopReason
from offbeat.services.telemetry import Partial, merge_all
from offbeat.trainer.algorithms.ratio import TokenLosses
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.data.batch import Batch, pack
from offbeat.trainer.data.selection import trained_episodes
from offbeat.trainer.losses.metrics import (
    batch_gauges,
    loss_gauges,
    policy_gauges,
    with_effective_sample_size,
)
from offbeat.trainer.losses.targets import build_targets
from tests.copying import replace
from tests.trainer.trajectories import group, trajectory, two_groups

RATIO = torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=torch.float64)
OLD = torch.full((4,), -2.0, dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, 0.0], dtype=torch.float64)
CLIPPED = torch.tensor([False, True, True, True])


def gauges_of(index: list[int]) -> dict[str, Partial]:
    new = (OLD + RATIO.log())[index]
    surrogate = TokenLosses(torch.zeros(len(index)), RATIO[index], CLIPPED[index])
    fresh = torch.tensor([True, False, True, False])[index]
    return policy_gauges(surrogate, new, torch.arange(4.0)[index], ADVANTAGES[index], OLD[index], OLD[index], fresh)


EXPECTED = {
    "actor/entropy": 1.5,
    "actor/ratio": 6.5 / 4,
    "actor/ratio_max": 3.0,
    "actor/approx_kl": sum(r - 1 - math.log(r) for r in RATIO.tolist()) / 4,
    "actor/clipfrac_up": 1 / 2,
    "actor/clipfrac_down": 1.0,
    "actor/mismatch_kl": sum(r - 1 - math.log(r) for r in RATIO.tolist()) / 4,
    "actor/mismatch_kl_fresh": (0.5 - 1 - math.log(0.5)) / 2,
    "actor/mismatch_abs": (math.log(3) + math.log(2) + math.log(2)) / 4,
    "actor/is_weight": 6.5 / 4,
    "actor/is_weight_square": 14.25 / 4,
    "actor/is_weight_max": 3.0,
}


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0], [1, 2], [3]], [[3, 2], [], [0, 1]]])
def test_gauges_do_not_depend_on_micro_batches(parts: list[list[int]]):
    merged = merge_all(gauges_of(part) for part in parts)
    assert {name: gauge.value for name, gauge in merged.items()} == pytest.approx(EXPECTED)


def test_effective_sample_size_covers_the_whole_step():
    merged = with_effective_sample_size(merge_all([gauges_of([0, 1]), gauges_of([2, 3])]))
    assert merged["actor/ess"].value == pytest.approx(6.5**2 / (4 * 14.25))
    assert with_effective_sample_size(gauges_of([0]))["actor/ess"].value == pytest.approx(1.0)
    assert with_effective_sample_size({}) == {}


def test_on_policy_gauges_show_no_mismatch():
    same = torch.tensor([-1.0, -2.0])
    surrogate = TokenLosses(torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.bool))
    got = policy_gauges(surrogate, same, same, torch.ones(2), same, same, None)
    assert got["actor/mismatch_kl"].value == got["actor/approx_kl"].value == got["actor/mismatch_abs"].value == 0.0
    assert "actor/mismatch_kl_fresh" not in got


def test_loss_gauge_is_sum_per_step_and_mean_over_steps():
    term, weights = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.full((4,), 0.5)
    parts = [loss_gauges({"x": term[:1]}, weights[:1], 0.5), loss_gauges({"x": term[1:2]}, weights[1:2], 0.5)]
    assert merge_all(parts)["x"].value == pytest.approx(1.5)
    parts.append(loss_gauges({"x": term[2:]}, weights[2:], 0.5))
    assert merge_all(parts)["x"].value == pytest.approx((1.5 + 6.0) / 2)


def everything(batch: Batch) -> torch.Tensor:
    return torch.ones(batch.num_trajectories, dtype=torch.bool)


def test_batch_gauges_describe_the_batch():
    batch = pack([*two_groups(), group(2, trajectory(0, [(1, 0, -3.0)]))])
    advantages, values = torch.linspace(-1, 2, 10), torch.zeros(10)
    returns = torch.tensor([1.0, 3.0] * 5)
    got = batch_gauges(batch, everything(batch), advantages, returns, values + 0.5 * returns, version=2)
    expected = {
        "shaped_reward/mean": (1.0 - 0.1 + 0.5 - 3.0) / 5,
        "shaped_reward/min": -3.0,
        "shaped_reward/max": 1.0,
        "advantage/mean": 0.5,
        "critic/returns/max": 3.0,
        "critic/values/min": 0.5,
        "critic/explained_variance": 0.75,
        "tokens/response_length/mean": 2.0,
        "tokens/response_length/max": 4.0,
        "tokens_trained": 10.0,
        "tokens/computed": float(batch.num_tokens),
        "actor/token_staleness/max": 2.0,
        "actor/token_staleness/min": 1.0,
        "actor/trajectory_age/min": 2.0,
        "actor/version_span/max": 1.0,
        "actor/version_span/mean": 2 / 4,
    }
    assert {name: got[name].value for name in expected} == pytest.approx(expected)


def test_the_critics_gauges_cover_the_tokens_that_it_is_trained_at():
    batch = pack(two_groups())
    config = AlgorithmConfig.model_validate({"adv_estimator": "gae", "gae_level": "turn"})
    first = batch.turn.diff(prepend=batch.turn.new_full((1,), -1)) != 0
    assert 1 < int(first.sum()) < batch.num_sampled
    values = torch.where(first, 0.0, 100.0)
    targets = build_targets(batch, config, values=values, version=2)
    got = batch_gauges(batch, everything(batch), targets.advantages, targets.returns, values, 2, targets.critic_weights)
    assert targets.returns is not None
    assert got["critic/values/max"].value == 0.0
    assert got["critic/returns/max"].value == pytest.approx(float(targets.returns[first].max()))
    assert got["critic/explained_variance"].value == pytest.approx(0.0, abs=1e-6)


def test_masked_episodes_are_in_no_gauge_of_trained_ones():
    """Nor is one without tokens."""
    cut = replace(trajectory(2, [(1, 3, 9.0)]), stop_reason=StopReason.MAX_LENGTH)
    empty = replace(trajectory(3, [(1, 0, 7.0)]), stop_reason=StopReason.MAX_LENGTH)
    batch = pack([group(0, trajectory(0, [(1, 2, 1.0)]), trajectory(1, [(1, 2, 0.0)]), cut, empty)])
    config = AlgorithmConfig.model_validate({"max_len_mask": True, "whiten_advantages": True})
    targets = build_targets(batch, config, version=2)
    got = batch_gauges(batch, trained_episodes(batch, config), targets.advantages, None, None, 2)
    assert got["advantage/mean"].value == pytest.approx(0.0, abs=1e-6)
    assert (got["advantage/mean"].count, got["shaped_reward/mean"].count) == (4, 2)
    assert (got["shaped_reward/mean"].value, got["shaped_reward/max"].value) == (0.5, 1.0)
    nothing = batch_gauges(batch, ~everything(batch), targets.advantages, None, None, 2)
    assert not {"advantage/mean", "shaped_reward/mean"} & nothing.keys()


def test_empty_batch_has_no_gauges():
    assert batch_gauges(pack([]), everything(pack([])), torch.zeros(0), None, None, 1) == {}
