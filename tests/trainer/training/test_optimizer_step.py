"""One optimizer batch, from groups to weights."""

import json
import math
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.services.messages.types import Group, StopReason, Trajectory
from offbeat.trainer.algorithms.aggregation import MaskedCounts
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.data.selection import masked_counts
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_critic, load_policy
from offbeat.trainer.models.policy import PackedPolicy
from offbeat.trainer.training.optimizer_step import BatchTrainer, StepModels
from tests.copying import replace
from tests.fakes import make_group, train_on
from tests.trainer.plain_engine import PlainEngine

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
GROUPS = [make_group(n, rewards=(0.0, 1.0, 1.0, 0.5)) for n in range(3)]
TREE: dict[str, object] = {
    "reward_normalization": {"method": "mean"},
    "entropy_loss_coef": 0.01,
    "actor_train": {"training_args": {"learning_rate": 1e-2, "max_tokens_per_microbatch": 1000}},
}


def config(**settings: object) -> LearnerConfig:
    return LearnerConfig.model_validate(TREE | settings)


def training(**settings: object) -> dict[str, object]:
    return {"training_args": {"learning_rate": 1e-2, "max_tokens_per_microbatch": 1000} | settings}


def trainer(
    folder: Path, settings: LearnerConfig, *, critic: bool = False, reference: bool = False
) -> tuple[BatchTrainer, PlainEngine, PlainEngine | None]:
    policy = PlainEngine(load_policy(folder, ModelArgs(), seed=1))
    head = PlainEngine(load_critic(folder, ModelArgs(), seed=1)) if critic else None
    frozen = FrozenModel(load_policy(folder, ModelArgs(), seed=1), ALONE) if reference else None
    return BatchTrainer(settings, StepModels(policy, head, frozen), ALONE), policy, head


def weights(engine: PlainEngine) -> Tensor:
    return torch.cat([tensor.flatten() for _, tensor in engine.tensors()])


def recipe_loss(policy: PackedPolicy, groups: Sequence[Group]) -> Tensor:
    """reward minus the group's mean, clipped ratio, mean over sampled tokens, entropy bonus: trajectory by trajectory,
    with transformers' own logits."""
    total, count = torch.zeros(()), 0
    for group in groups:
        mean = sum(t.reward for t in group.trajectories) / len(group.trajectories)
        for trajectory in group.trajectories:
            logp, entropy, old = _sampled(policy, trajectory)
            ratio = (logp - old).exp()
            advantage = trajectory.reward - mean
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total = total - surrogate.sum() - 0.01 * entropy.sum()
            count += len(old)
    return total / count


def _sampled(policy: PackedPolicy, trajectory: Trajectory) -> tuple[Tensor, Tensor, Tensor]:
    (segment,) = trajectory.segments
    tokens = torch.from_numpy(segment.tokens).long()
    where = torch.from_numpy(segment.loss_mask).nonzero()[:, 0]
    twin = policy.model
    logits = twin(tokens[None], attention_mask=None, packing=_alone(len(tokens)), use_cache=False).logits[0]
    logp = torch.log_softmax(logits, dim=-1)[where - 1]
    chosen = logp.gather(1, tokens[where][:, None])[:, 0]
    return chosen, -(logp.exp() * logp).sum(1), torch.from_numpy(segment.logprobs)[where]


def _alone(length: int) -> object:
    from offbeat.trainer.models.packing import Packing

    return Packing.of(torch.tensor([0, length]))


def test_an_entropy_bonus_falls_with_the_steps_as_its_scheduler_says(folder: Path) -> None:
    def after(step: int, **settings: object) -> Tensor:
        batches, engine, _ = trainer(folder, config(max_steps=4, **settings))
        train_on(batches, GROUPS, step)
        return weights(engine)

    falling = {"entropy_loss_coef": 0.4, "entropy_loss_scheduler_type": "linear"}
    for step, coef in ((0, 0.4), (1, 0.3), (2, 0.2)):
        assert torch.equal(after(step, **falling), after(step, entropy_loss_coef=coef))
    assert not torch.equal(after(2, **falling), after(2, entropy_loss_coef=0.4))


def test_a_step_is_the_recipes_by_hand(folder: Path) -> None:
    batches, engine, _ = trainer(folder, config())
    twin = load_policy(folder, ModelArgs(), seed=1)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)
    for step in range(2):
        gauges = train_on(batches, GROUPS, step)
        loss = recipe_loss(twin, GROUPS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        assert gauges["actor/total_loss"].value == pytest.approx(float(loss.detach()), abs=1e-5)
    expected = torch.cat([p.detach().flatten() for p in twin.parameters()])
    torch.testing.assert_close(weights(engine), expected, rtol=0, atol=1e-5)


def test_the_token_budget_does_not_change_the_step(folder: Path) -> None:
    whole, one, _ = trainer(folder, config())
    cut, two, _ = trainer(folder, config(actor_train=training(max_tokens_per_microbatch=20)))
    gauges = [train_on(batches, GROUPS, 0) for batches in (whole, cut)]
    assert (len(one.seen[0]), len(two.seen[0])) == (1, 6)
    torch.testing.assert_close(weights(one), weights(two), rtol=0, atol=1e-6)
    assert gauges[0].keys() == gauges[1].keys()
    for name in ("actor/total_loss", "actor/entropy", "actor/mismatch_kl", "actor/mismatch_abs_max"):
        assert gauges[0][name].value == pytest.approx(gauges[1][name].value, abs=1e-6)


def test_minibatches_and_epochs_make_that_many_optimizer_steps(folder: Path) -> None:
    batches, engine, _ = trainer(folder, config(ppo_epochs=2, actor_train=training(num_minibatches=3)))
    gauges = train_on(batches, GROUPS, 0)
    assert len(engine.seen) == 6
    tokens = [sum(len(x.tokens) for x in batch) for batch in engine.seen]
    assert sum(tokens) == 2 * int(gauges["tokens/computed"].total)


def test_the_engine_is_compared_before_the_weights_change(folder: Path) -> None:
    """Later passes have other weights, which is no mismatch of engine and learner."""
    once, often = (
        train_on(trainer(folder, config(ppo_epochs=epochs))[0], GROUPS, 0)["actor/mismatch_kl_fresh"]
        for epochs in (1, 3)
    )
    assert often == once


def test_recomputed_logprobs_start_the_ratio_at_one(folder: Path) -> None:
    stale, _, _ = trainer(folder, config())
    fresh, _, _ = trainer(folder, config(old_logprobs="recompute"))
    assert train_on(stale, GROUPS, 0)["actor/ratio"].value != pytest.approx(1.0, abs=1e-3)
    assert train_on(fresh, GROUPS, 0)["actor/ratio"].value == pytest.approx(1.0, abs=1e-5)


def test_one_optimizer_step_needs_no_extra_pass_for_old_logprobs(folder: Path) -> None:
    def after(minibatches: int = 1, **correction: object) -> tuple[Tensor, dict[str, float], int]:
        weighed = {"is_weight": {"upper_bound": 1.0}, "filters": ({"ratio_low": 0.5},), **correction}
        given = {"old_logprobs": "recompute", "train_infer_correction": weighed}
        batches, engine, _ = trainer(folder, config(**given, actor_train=training(num_minibatches=minibatches)))
        passes: list[bool] = []
        engine.module.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
        gauges = [train_on(batches, GROUPS, step) for step in range(2)][-1]
        return weights(engine), {name: each.value for name, each in gauges.items()}, passes.count(False)

    learnt, gauges, extra = after()
    expected, exact, before = after(m2_threshold=1e9)  # keeps every token, and looks at the start
    assert (extra, before) == (0, 2)
    torch.testing.assert_close(learnt, expected, rtol=0, atol=1e-7)
    assert gauges == pytest.approx(exact, rel=1e-5, abs=1e-6)
    assert 0 < gauges["actor/correction_clipfrac"] < 1
    assert after(minibatches=2)[2] == 2


def test_the_learning_rate_follows_the_schedule(folder: Path) -> None:
    settings = config(max_steps=6, actor_train=training(warmup_steps=2, lr_scheduler_type="linear"))
    batches, engine, _ = trainer(folder, settings)
    for step in range(5):
        train_on(batches, GROUPS[:1], step)
    assert engine.rates == pytest.approx([5e-3, 1e-2, 1e-2, 7.5e-3, 5e-3])


def test_a_penalty_on_divergence_holds_the_policy_near_its_reference(folder: Path) -> None:
    divergence: list[float] = []
    for coef in (1e-6, 10.0):
        batches, _, _ = trainer(folder, config(use_kl_loss=True, kl_loss_coef=coef), reference=True)
        seen = [train_on(batches, GROUPS, step)["actor/kl_loss"].value for step in range(12)]
        assert seen[0] == pytest.approx(0.0, abs=1e-9)
        divergence.append(seen[-1])
    assert divergence[1] < divergence[0] / 2


def test_the_full_vocabulary_penalty_is_invariant_to_batch_cuts(folder: Path) -> None:
    def after(coef: float, budget: int) -> tuple[float, Tensor]:
        kl = {"use_kl_loss": True, "kl_loss_coef": coef, "kl_loss_type": "full"}
        cut = training(max_tokens_per_microbatch=budget)
        batches, engine, _ = trainer(folder, config(**kl, actor_train=cut), reference=True)
        seen = [train_on(batches, GROUPS, step)["actor/kl_loss"].value for step in range(8)]
        assert seen[0] == pytest.approx(0.0, abs=1e-6)
        return seen[-1], weights(engine)

    (free, _), (held, whole), (_, cut) = after(1e-6, 1000), after(10.0, 1000), after(10.0, 20)
    assert held < free / 2
    torch.testing.assert_close(whole, cut, rtol=0, atol=1e-4)


@pytest.mark.parametrize("budget", [20, 1000])
def test_the_full_kl_in_the_reward_sums_over_the_vocabulary(folder: Path, budget: int) -> None:
    """It is computed with the policy at the step's start."""
    in_reward = {"add_token_level_kl": True, "init_kl_coef": 0.5, "kl_penalty": "full", "old_logprobs": "recompute"}
    own = {"adv_estimator": "reinforce", "gamma": 0.0, "reward_normalization": {"method": "identity"}}
    settings = config(**in_reward, **own, actor_train=training(max_tokens_per_microbatch=budget))
    batches, engine, _ = trainer(folder, settings, reference=True)
    kl = [train_on(batches, GROUPS, step)["actor/kl_in_reward"].value for step in range(3)]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[2] > kl[1] > 0
    seen = batches.preview(StepBatch.build(3, GROUPS, batches._config))
    assert seen is not None
    assert isinstance(engine.module, PackedPolicy)
    start = load_policy(folder, ModelArgs(), seed=1)
    episodes = [trajectory for group in GROUPS for trajectory in group.trajectories]
    divergences = torch.cat([full_kl_by_hand(engine.module, start, each) for each in episodes]).float()
    assert divergences.max() > 1e-3
    torch.testing.assert_close(
        seen.targets.advantages, seen.batch.turn_reward - 0.5 * divergences, rtol=1e-4, atol=1e-6
    )


def full_kl_by_hand(policy: PackedPolicy, reference: PackedPolicy, trajectory: Trajectory) -> Tensor:
    """[sampled tokens] float64"""
    (segment,) = trajectory.segments
    tokens = torch.from_numpy(segment.tokens).long()
    before = torch.from_numpy(segment.loss_mask).nonzero()[:, 0] - 1
    said: list[Tensor] = []
    for model in (policy, reference):
        twin = deepcopy(model.model).double()
        logits = twin(tokens[None], attention_mask=None, packing=_alone(len(tokens)), use_cache=False).logits[0]
        said.append(logits[before].detach().log_softmax(-1))
    p, q = said
    return (p.exp() * (p - q)).sum(-1)


def test_a_reference_that_is_refreshed_moves_to_the_policy(folder: Path) -> None:
    def divergences(**settings: object) -> list[float]:
        kl = {"use_kl_loss": True, "kl_loss_coef": 1e-6}
        batches, _, _ = trainer(folder, config(**kl, **settings), reference=True)
        return [train_on(batches, GROUPS, step)["actor/kl_loss"].value for step in range(5)]

    frozen = divergences()
    every = divergences(ref_model_sync_steps=2)
    half = divergences(ref_model_sync_steps=2, ref_model_mixup_alpha=0.5)
    assert every[:2] == pytest.approx(frozen[:2])
    assert every[2] == pytest.approx(0.0, abs=1e-9) == every[4]
    assert every[3] > 1e-6
    assert every[2] < half[2] < frozen[2]


def test_the_kl_coefficient_adapts_and_is_part_of_the_state(folder: Path) -> None:
    settings = config(add_token_level_kl=True, init_kl_coef=0.2, target_kl=1e-6, kl_horizon=12)
    batches, _, _ = trainer(folder, settings, reference=True)
    assert batches.kl.coef == 0.2
    for step in range(2):
        train_on(batches, GROUPS, step)
    assert batches.kl.coef > 0.2


def test_gae_trains_the_critic_and_the_policy_waits_for_it(folder: Path) -> None:
    settings = config(adv_estimator="gae", critic_warmup=2, reward_normalization={"method": "identity"})
    batches, policy, critic = trainer(folder, settings, critic=True)
    assert critic is not None
    start = weights(policy)
    losses = [train_on(batches, GROUPS, step)["critic/loss"].value for step in range(2)]
    assert torch.equal(weights(policy), start)
    losses += [train_on(batches, GROUPS, step)["critic/loss"].value for step in range(2, 6)]
    assert losses[-1] < losses[0]
    assert len(policy.rates) == 4
    assert not torch.equal(weights(policy), start)


def test_running_statistics_are_kept_over_steps_and_part_of_the_state(folder: Path) -> None:
    settings = config(reward_normalization={"norm_mean_type": "running", "norm_std_type": "running"})
    batches, _, _ = trainer(folder, settings)
    for step in range(2):
        train_on(batches, GROUPS, step)
    ((count, mean, _),) = batches.state_dict()["running"].values()
    assert (count, mean) == (24, pytest.approx(2.5 / 4))
    again, _, _ = trainer(folder, settings)
    again.load_state_dict(json.loads(json.dumps(batches.state_dict())))
    for each in (batches, again):
        train_on(each, GROUPS[:1], 2)
    assert again.state_dict() == batches.state_dict() != {"running": {}}


def test_running_statistics_include_a_step_whose_groups_are_all_masked(folder: Path) -> None:
    batches, _, _ = trainer(folder, config(reward_normalization={"norm_mean_type": "running"}))
    failed = StepBatch.build(0, [], batches._config, masked=MaskedCounts(32, 8, 2, 8), new_rewards={"tag": [0.0] * 8})
    assert batches.train(failed) == {}
    ((count, mean, _),) = batches.state_dict()["running"].values()
    assert (count, mean) == (8, 0.0)


def test_the_filter_of_variance_leaves_groups_out_of_the_step(folder: Path) -> None:
    half, engine, _ = trainer(folder, config(variance_filter_ratio=0.4))
    gauges = train_on(half, [*GROUPS, make_group(7, rewards=(0.0, 5.0, 0.0, 5.0))], 0)
    assert gauges["system/groups_left_out"].total == 2.0
    assert gauges["shaped_reward/max"].value == 5.0
    assert len(engine.seen) == 1


def test_shaped_rewards_are_what_is_trained_on(folder: Path) -> None:
    batches, _, _ = trainer(folder, config(reward_shaping={"response_length_penalty_coef": 0.5}))
    tokens = sum(t.num_sampled for g in GROUPS for t in g.trajectories)
    plain = sum(t.reward for g in GROUPS for t in g.trajectories)
    assert train_on(batches, GROUPS, 0)["shaped_reward/mean"].value == pytest.approx(
        (plain - 0.5 * tokens) / 12, abs=1e-5
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss_agg_mode": "seq-mean-token-sum"},
        {"loss_agg_mode": "seq-mean-token-mean"},
        {"loss_agg_mode": "seq-mean-token-sum-norm"},
        {"pg_variant": "gpg"},
        {"pg_variant": "gpg", "max_len_mask": True},
        {"adv_estimator": "gigpo", "pg_variant": "gpg"},
        {"adv_estimator": "gdpo", "max_len_mask": True},
        {"max_len_mask": True},
        {"max_len_mask": True, "loss_agg_mode": "seq-mean-token-mean"},
        {"variance_filter_ratio": 0.5},
        {"variance_filter_ratio": 0.4},
    ],
)
def test_masking_zero_signal_groups_keeps_the_gradient(folder: Path, settings: dict[str, object]) -> None:
    varied = [make_group(n, rewards=(0.0, 0.1, 0.1, 0.05)) for n in range(3)]
    cut = make_group(8, rewards=(0.0,) * 5)
    members = tuple(replace(each, stop_reason=StopReason.MAX_LENGTH) for each in cut.trajectories)
    silent = make_group(9, rewards=(0.0,) * 4)
    silent = replace(silent, trajectories=tuple(without_tokens(each) for each in silent.trajectories))
    flat = [make_group(7, rewards=(1.0,) * 4), replace(cut, trajectories=members), silent]

    def gradient(groups: Sequence[Group], zero_variance: str, masked: MaskedCounts) -> Tensor:
        unclipped = training(max_grad_norm=1e9)
        chosen = config(entropy_loss_coef=0.0, zero_variance=zero_variance, actor_train=unclipped, **settings)
        batches, engine, _ = trainer(folder, chosen)
        train_on(batches, groups, 0, masked)
        return torch.cat([p.grad.flatten() for p in engine.module.parameters() if p.grad is not None])

    masked = gradient(varied, "mask", masked_counts(flat, config(**settings)))
    assert masked.norm() > 0
    torch.testing.assert_close(masked, gradient([*varied, *flat], "train", MaskedCounts()))


def without_tokens(trajectory: Trajectory) -> Trajectory:
    """Return an episode whose first prompt left no room for an answer."""
    (segment, *_) = trajectory.segments
    mask, logprobs = np.zeros_like(segment.loss_mask), np.zeros_like(segment.logprobs)
    empty = replace(segment, loss_mask=mask, logprobs=logprobs, versions=())
    return replace(trajectory, segments=(empty,), turns=(), stop_reason=StopReason.MAX_LENGTH)


def test_nothing_to_learn_from_leaves_everything_alone(folder: Path) -> None:
    batches, engine, _ = trainer(folder, config())
    assert train_on(batches, [], 0) == {}
    assert not engine.seen


def test_a_step_whose_episodes_are_all_left_out_moves_nothing(folder: Path) -> None:
    batches, engine, _ = trainer(folder, config(max_len_mask=True))
    train_on(batches, GROUPS, 0)
    before = weights(engine)
    cut = [
        replace(each, trajectories=tuple(replace(t, stop_reason=StopReason.MAX_LENGTH) for t in each.trajectories))
        for each in GROUPS
    ]
    gauges = train_on(batches, cut, 1)
    assert torch.equal(weights(engine), before)
    assert len(engine.seen) == 1
    assert gauges["tokens_trained"].total > 0
    train_on(batches, [GROUPS[0], *cut[1:]], 2)
    assert not torch.equal(weights(engine), before)


def test_a_loss_that_is_not_finite_is_counted(folder: Path) -> None:
    batches, engine, _ = trainer(folder, config())
    start = weights(engine)
    engine.module.register_forward_hook(lambda _m, _x, said: said._replace(logprobs=said.logprobs * math.nan))
    gauges = train_on(batches, GROUPS, 0)
    assert gauges["actor/skipped_steps"].total == 1.0
    assert torch.equal(weights(engine), start)
