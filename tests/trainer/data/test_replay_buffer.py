"""Replay buffer: selection, use counts, staleness and weights of replayed groups."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from offbeat.services.messages.types import Group
from offbeat.trainer.checks.learner import check_learner
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.replay import ReplayConfig
from offbeat.trainer.data.batch import pack
from offbeat.trainer.data.replay_buffer import ReplayBuffer, ReplayedGroups
from offbeat.trainer.losses.policy_loss import policy_loss
from offbeat.trainer.losses.targets import apply_group_weights, build_targets
from tests.fakes import make_group
from tests.trainer.outcome import inputs_of, rich_groups

PER_STEP = 4


def replayed(
    steps: int, *, per_step: int = PER_STEP, staleness: float = math.inf, **options: Any
) -> list[ReplayedGroups]:
    """What joined each step's batch when `per_step` new groups, sampled by the newest weights, came in each."""
    replay = ReplayBuffer(ReplayConfig(**options), per_step, seed=7)
    joined: list[ReplayedGroups] = []
    for step in range(steps):
        again = replay.select(step, staleness)
        assert again == replay.select(step, staleness)
        joined.append(again)
        replay.update(fresh(step, per_step), again)
    return joined


def fresh(step: int, per_step: int = PER_STEP) -> list[Group]:
    return [make_group(step * per_step + i, rewards=(0.0, 1.0 + i), version=step) for i in range(per_step)]


def numbers(again: ReplayedGroups) -> list[int]:
    return [group.number for group in again.groups]


def test_nothing_is_replayed_by_default() -> None:
    assert replayed(5) == [ReplayedGroups()] * 5


@settings(max_examples=40, deadline=None)
@given(
    rate=st.floats(1.1, 4.0),
    max_times=st.integers(2, 5),
    size=st.integers(1, 30),
    bound=st.integers(0, 6),
    sampler=st.sampled_from(["fifo", "lifo", "uniform", "prioritized"]),
)
def test_replay_respects_max_times_uniqueness_and_staleness(
    rate: float, max_times: int, size: int, bound: int, sampler: str
) -> None:
    options = {"samples_per_insert": rate, "max_times_sampled": max_times, "max_size": size, "sampler": sampler}
    joined = replayed(12, staleness=bound, **options)
    times = dict.fromkeys(range(12 * PER_STEP), 1)
    for step, again in enumerate(joined):
        assert len(set(numbers(again))) == len(again.groups) == len(again.weights) <= size
        for group in again.groups:
            times[group.number] += 1
            assert 0 < step - group.oldest_version <= bound
    assert max(times.values()) <= max_times


@pytest.mark.parametrize("rate", [1.25, 1.6, 2.0, 3.0])
def test_mean_use_count_is_samples_per_insert(rate: float) -> None:
    joined = replayed(41, samples_per_insert=rate, max_times_sampled=6)[2:]
    assert sum(len(again.groups) for again in joined) == pytest.approx((rate - 1) * PER_STEP * 39, abs=1)


def test_samplers_select_oldest_newest_or_random() -> None:
    one_each = {"samples_per_insert": 1.25, "max_times_sampled": 5}
    assert [numbers(again) for again in replayed(4, sampler="fifo", **one_each)] == [[], [0], [0], [0]]
    assert [numbers(again) for again in replayed(4, sampler="lifo", **one_each)] == [[], [3], [7], [11]]
    drawn = {number for again in replayed(60, sampler="uniform", max_size=4, **one_each) for number in numbers(again)}
    assert {number % PER_STEP for number in drawn} == {0, 1, 2, 3}


def test_replay_has_its_own_staleness_bound() -> None:
    options = {"samples_per_insert": 2.0, "max_times_sampled": 9, "max_size": 100}
    ages = [
        step - group.oldest_version
        for step, again in enumerate(replayed(12, staleness=1, max_staleness=3.0, **options))
        for group in again.groups
    ]
    assert max(ages) == 3


def test_groups_of_equal_rewards_are_drawn_with_a_large_exponent_too() -> None:
    groups = [make_group(number, rewards=(1.0, float(number == 0)), version=0) for number in range(PER_STEP)]
    replay = ReplayBuffer(
        ReplayConfig(samples_per_insert=2.0, sampler="prioritized", priority_exponent=1000.0), PER_STEP, seed=3
    )
    replay.update(groups, ReplayedGroups())
    assert sorted(numbers(replay.select(1, math.inf))) == list(range(PER_STEP))
    assert all(map(math.isfinite, replay.select(1, math.inf).weights))


def test_prioritized_groups_are_drawn_more_often_and_weigh_less() -> None:
    options = {"samples_per_insert": 1.25, "max_times_sampled": 10**6, "max_size": PER_STEP, "sampler": "prioritized"}
    replay = ReplayBuffer(
        ReplayConfig(**options, priority_exponent=1.0, importance_sampling_exponent=1.0), PER_STEP, seed=3
    )
    replay.update(fresh(0), ReplayedGroups())
    counts = [0] * PER_STEP
    for step in range(4000):
        (number,) = numbers(replay.select(step, math.inf))
        counts[number] += 1
    assert [count / 4000 for count in counts] == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.03)
    everything = ReplayBuffer(ReplayConfig(**options | {"samples_per_insert": 2.0}, priority_exponent=1.0,
                                     importance_sampling_exponent=1.0), PER_STEP, seed=3)  # fmt: skip
    everything.update(fresh(0), ReplayedGroups())
    assert everything.select(1, math.inf).weights == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4], rel=1e-4)
    flat = ReplayBuffer(
        ReplayConfig(**options | {"samples_per_insert": 2.0}, importance_sampling_exponent=0.0), PER_STEP, seed=3
    )
    flat.update(fresh(0), ReplayedGroups())
    assert flat.select(1, math.inf).weights == (1.0,) * PER_STEP


def test_entries_are_restored_from_checkpoint(tmp_path: Path) -> None:
    config = ReplayConfig(samples_per_insert=2.0, max_times_sampled=3)
    one, two = ReplayBuffer(config, PER_STEP, seed=7), ReplayBuffer(config, PER_STEP, seed=7)
    for step in range(3):
        one.update(fresh(step), one.select(step, math.inf))
    one.save(tmp_path)
    two.load(tmp_path)
    for step in range(3, 8):
        again, twin = one.select(step, math.inf), two.select(step, math.inf)
        assert (numbers(again), again.weights) == (numbers(twin), twin.weights)
        assert [t.reward for g in again.groups for t in g.trajectories] == [
            t.reward for g in twin.groups for t in g.trajectories
        ]
        one.update(fresh(step), again)
        two.update(fresh(step), twin)
    two.load(tmp_path / "of a run that kept none")
    assert not len(two)


def test_group_weight_scales_only_its_policy_loss() -> None:
    config = AlgorithmConfig(entropy_loss_coef=0.1)
    batch = pack(rich_groups())
    targets = build_targets(batch, config, **inputs_of(batch, config))
    weights = [0.5, 1.0, 0.25, 1.0, 1.0, 2.0]

    def gradient(which: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = (batch.behavior_logprobs + 0.05).requires_grad_()
        entropy = torch.ones(batch.num_sampled, requires_grad=True)
        loss, _ = policy_loss(config, logprobs, entropy, which)
        policy, of_entropy = torch.autograd.grad(loss, [logprobs, entropy])
        return policy, of_entropy

    plain, heavy = gradient(targets), gradient(apply_group_weights(targets, batch, weights))
    of_token = torch.tensor([weights[int(batch.group[t])] for t in batch.trajectory.tolist()])
    torch.testing.assert_close(heavy[0], plain[0] * of_token)
    assert torch.equal(heavy[1], plain[1])
    assert apply_group_weights(targets, batch, [1.0] * 6) is targets


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"pg_variant": "vanilla"}, "replay.samples_per_insert"),
        ({"old_logprobs": "recompute"}, "replay.samples_per_insert"),
        ({"replay": {"samples_per_insert": 5.0, "max_times_sampled": 2}}, "replay.max_times_sampled"),
        ({"old_logprobs": "recompute", "train_infer_correction": {"is_weight": {}}}, None),
        ({"pg_variant": "aipo"}, None),
        ({}, None),
    ],
)
def test_replay_without_correction_is_reported(settings: dict[str, Any], path: str | None) -> None:
    config = LearnerConfig.model_validate({"replay": {"samples_per_insert": 2.0}} | settings)
    assert [issue.path for issue in check_learner(config)] == ([path] if path else [])


@pytest.mark.parametrize("options", [{"max_times_sampled": 3}, {"samples_per_insert": 2.0, "priority_exponent": 1.0}])
def test_replay_key_without_effect_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="has no effect"):
        ReplayConfig(**options)
