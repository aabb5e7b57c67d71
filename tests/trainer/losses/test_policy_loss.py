import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offbeat.services.telemetry import merge_all
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.corrections import ImportanceWeight, TrainInferCorrection
from offbeat.trainer.config.rewards import RewardNormalization
from offbeat.trainer.data.batch import (
    Batch,
    microbatches,
    minibatches,
    pack,
)
from offbeat.trainer.losses.policy_loss import critic_loss, policy_loss
from offbeat.trainer.losses.targets import Targets, build_targets
from tests.trainer.trajectories import (
    cut_into_segments,
    group,
    trajectory,
    two_groups,
)

MEAN = RewardNormalization(method="mean")
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


def shifted(batch: Batch) -> Tensor:
    """Return logprobs that depend on the token id alone, hence not on the order."""
    return batch.behavior_logprobs + 0.4 * torch.cos(batch.tokens[batch.positions].float())


def entropy_of(batch: Batch) -> Tensor:
    return 1.0 + torch.sin(batch.tokens[batch.positions].float())


def gradient(config: AlgorithmConfig, logprobs: Tensor, targets: Targets) -> Tensor:
    logprobs = logprobs.clone().requires_grad_()
    loss, _ = policy_loss(config, logprobs, torch.zeros_like(logprobs), targets)
    return torch.autograd.grad(loss, logprobs)[0]


shapes_of = st.lists(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 4), st.sampled_from([0.0, 1.0])), min_size=1, max_size=3),
    min_size=1,
    max_size=8,
)


@given(shapes_of, st.sampled_from(MODES), st.integers(1, 60), st.integers(1, 4), st.sampled_from(["ppo", "tis"]))
def test_losses_and_gradients_of_micro_batches_sum_to_the_batchs(shapes, mode, budget, count, variant):
    batch = pack([group(0, *(trajectory(i, shape, base=50 * i) for i, shape in enumerate(shapes)))])
    config = AlgorithmConfig(
        adv_estimator="reinforce", loss_agg_mode=mode, entropy_loss_coef=0.1, pg_variant=variant, reward_clip=0.5
    )
    logprobs = shifted(batch).requires_grad_()
    whole, whole_gauges = policy_loss(config, logprobs, entropy_of(batch), build_targets(batch, config))
    (whole_gradient,) = torch.autograd.grad(whole, logprobs)
    targets = build_targets(batch, config, num_minibatches=count)
    parts = minibatches(batch, count)
    loss, gauges = torch.zeros(()), []
    for part in parts:
        for micro in microbatches(batch, part, budget):
            share, seen = policy_loss(
                config, logprobs[micro.index], entropy_of(batch)[micro.index], targets.at(micro.index)
            )
            loss = loss + share
            gauges.append(seen)
    torch.testing.assert_close(loss / len(parts), whole)
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0] / len(parts), whole_gradient)
    merged = merge_all(gauges)
    assert merged.keys() == whole_gauges.keys()
    for name, gauge in whole_gauges.items():
        assert merged[name].value == pytest.approx(gauge.value, rel=1e-4, abs=1e-5), name


@given(st.permutations(range(4)), st.sampled_from(MODES))
def test_result_does_not_depend_on_trajectory_order(order: list[int], mode: str):
    config = AlgorithmConfig(reward_normalization=MEAN, loss_agg_mode=mode)
    members = [trajectory(i, [(2, 1 + i, float(i == 2))], base=10 * i) for i in range(4)]

    def loss(chosen: list[int]) -> Tensor:
        batch = pack([group(0, *(members[i] for i in chosen))])
        return policy_loss(config, shifted(batch), entropy_of(batch), build_targets(batch, config))[0]

    torch.testing.assert_close(loss(order), loss([0, 1, 2, 3]))


@pytest.mark.parametrize("variant", ["ppo", "tis"])
@pytest.mark.parametrize("mode", MODES)
def test_on_policy_gradient_equals_reinforce(variant: str, mode: str):
    batch = pack(two_groups())
    config = AlgorithmConfig(reward_normalization=MEAN, pg_variant=variant, loss_agg_mode=mode)
    targets = build_targets(batch, config)
    sizes = torch.tensor([3.0] * 3 + [2.0] * 2 + [1.0] + [4.0] * 4)
    weight = {"token-mean": 1 / 10, "seq-mean-token-sum": 1 / 4, "seq-mean-token-mean": 1 / (4 * sizes)}[mode]
    torch.testing.assert_close(gradient(config, batch.behavior_logprobs, targets), -targets.advantages * weight)


@pytest.mark.parametrize("mode", MODES[1:])
def test_segmented_trajectory_counts_as_one_sequence(mode: str):
    config = AlgorithmConfig(reward_normalization=MEAN, loss_agg_mode=mode)
    whole = two_groups()
    cut = [group(g.number, *(cut_into_segments(t) for t in g.trajectories)) for g in whole]
    assert torch.equal(build_targets(pack(cut), config).weights, build_targets(pack(whole), config).weights)


def test_old_logprobs_are_the_engines_unless_recomputed():
    batch = pack(two_groups())
    config = AlgorithmConfig(reward_normalization=MEAN)
    assert torch.equal(build_targets(batch, config).old_logprobs, batch.behavior_logprobs)
    recompute = AlgorithmConfig(reward_normalization=MEAN, old_logprobs="recompute")
    with pytest.raises(ValueError, match="recompute"):
        build_targets(batch, recompute)
    own = shifted(batch)
    targets = build_targets(batch, recompute, old_logprobs=own)
    torch.testing.assert_close(gradient(recompute, own, targets), -targets.advantages / batch.num_sampled)


def test_decoupled_ppo_weights_tokens_by_truncated_old_to_behavior_ratio():
    batch = pack(two_groups())
    correction = TrainInferCorrection(is_weight=ImportanceWeight(upper_bound=1.5))
    config = AlgorithmConfig(reward_normalization=MEAN, old_logprobs="recompute", train_infer_correction=correction)
    shift = torch.linspace(-1.0, 1.0, batch.num_sampled)
    old = batch.behavior_logprobs + shift
    targets = build_targets(batch, config, old_logprobs=old)
    expected = -shift.exp().clamp(max=1.5) * targets.advantages / batch.num_sampled
    torch.testing.assert_close(gradient(config, old, targets), expected)


@pytest.mark.parametrize(
    ("change", "moved", "advantages", "expected"),
    [
        ({"pg_clip": 0.2}, [0.5, -0.5], [1.0, -1.0], [0.0, 0.0]),
        ({"pg_clip": 2.0}, [0.5, -0.5], [1.0, -1.0], [-1.6487, 0.6065]),
        ({"pg_clip": 0.2, "pg_clip_high": 2.0}, [0.5, -0.5], [1.0, -1.0], [-1.6487, 0.0]),
        ({"pg_clip": 0.2, "pg_clip_low": 0.9}, [0.5, -0.5], [1.0, -1.0], [0.0, 0.6065]),
        ({"dual_clip": 1.5}, [0.5, 0.3], [-1.0, -1.0], [0.0, 1.3499]),
        ({"pg_variant": "tis", "tis_upper_bound": 1.2}, [0.5, -0.5], [1.0, -1.0], [-1.2, 0.6065]),
    ],
)
def test_each_clip_bound_limits_the_loss(change: dict, moved: list[float], advantages: list[float], expected):
    behavior, weights = torch.tensor([-1.0, -1.0]), torch.ones(2)
    targets = Targets(torch.tensor(advantages), weights, behavior, behavior, *(torch.arange(2),) * 2, token_share=0.5)
    got = gradient(AlgorithmConfig(**change), behavior + torch.tensor(moved), targets)
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-3, atol=1e-3)


def test_entropy_bonus_is_subtracted():
    batch = pack(two_groups())
    plain = AlgorithmConfig(reward_normalization=MEAN)
    bonus = AlgorithmConfig(reward_normalization=MEAN, entropy_loss_coef=0.5)
    entropy = entropy_of(batch).requires_grad_()
    loss, _ = policy_loss(bonus, shifted(batch), entropy, build_targets(batch, bonus))
    base, _ = policy_loss(plain, shifted(batch), entropy, build_targets(batch, plain))
    torch.testing.assert_close(base - loss, 0.5 * entropy.mean())
    torch.testing.assert_close(torch.autograd.grad(loss, entropy)[0], torch.full_like(entropy, -0.05))


def test_kl_loss_adds_k3_and_pulls_towards_the_reference():
    batch = pack(two_groups())
    config = AlgorithmConfig(reward_normalization=MEAN, use_kl_loss=True, kl_loss_coef=0.3)
    with pytest.raises(ValueError, match="reference"):
        build_targets(batch, config)
    targets = build_targets(batch, config, ref_logprobs=batch.behavior_logprobs + 0.5)
    got = gradient(config, batch.behavior_logprobs, targets)
    pull = 0.3 * (1 - torch.exp(torch.tensor(0.5)))
    torch.testing.assert_close(got, (-targets.advantages + pull) / batch.num_sampled)
    _, gauges = policy_loss(config, batch.behavior_logprobs, entropy_of(batch), targets)
    assert gauges["actor/kl_loss"].value == pytest.approx(2.718281828**0.5 - 1.5, rel=1e-4)


def test_critic_loss_is_token_mean_with_configured_clip():
    batch = pack([group(0, trajectory(0, [(1, 2, 1.0)]))])
    config = AlgorithmConfig(adv_estimator="gae", lambd=1.0, loss_agg_mode="seq-mean-token-sum")
    targets = build_targets(batch, config, values=torch.tensor([0.25, 0.5]))
    values = torch.tensor([1.5, 0.0])
    loss, gauges = critic_loss(config, values, targets)
    assert float(loss) == pytest.approx(0.5 * (0.5**2 + 1.0**2) / 2)
    assert gauges["critic/loss"].value == pytest.approx(float(loss))
    clipped = config.model_copy(update={"value_clip": 0.1})
    assert float(critic_loss(clipped, values, targets)[0]) == pytest.approx(0.5 * (0.65**2 + 1.0**2) / 2)


def test_critic_loss_requires_returns():
    batch = pack(two_groups())
    with pytest.raises(ValueError, match="returns"):
        critic_loss(AlgorithmConfig(), torch.zeros(10), build_targets(batch, AlgorithmConfig()))


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_extreme_ratios_give_finite_losses_gradients_and_gauges(shift: float):
    batch = pack(two_groups())
    config = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1)
    targets = build_targets(batch, config, ref_logprobs=batch.behavior_logprobs)
    logprobs = (batch.behavior_logprobs + shift).requires_grad_()
    loss, gauges = policy_loss(config, logprobs, entropy_of(batch), targets)
    assert torch.isfinite(torch.autograd.grad(loss, logprobs)[0]).all()
    assert all(abs(gauge.value) < 1e30 for gauge in gauges.values())


def test_empty_batch_has_differentiable_zero_loss():
    config = AlgorithmConfig()
    nothing = torch.zeros(0, requires_grad=True)
    loss, gauges = policy_loss(config, nothing, torch.zeros(0), build_targets(pack([]), config))
    loss.backward()
    assert loss.item() == 0.0
    assert gauges["actor/pg_loss"].value == 0.0


def test_targets_at_selects_tokens():
    batch = pack(two_groups())
    config = AlgorithmConfig(adv_estimator="gae", use_kl_loss=True, kl_loss_coef=0.1)
    targets = build_targets(
        batch, config, values=entropy_of(batch), ref_logprobs=shifted(batch), version=0, old_logprobs=shifted(batch) - 1
    )
    index = torch.tensor([7, 0, 3])
    some = targets.at(index, torch.device("cpu"))
    for name in Targets.__slots__:
        whole, part = getattr(targets, name), getattr(some, name)
        assert torch.equal(part, whole[index]) if isinstance(whole, Tensor) else part == whole
