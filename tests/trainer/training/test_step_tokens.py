"""What the learner keeps of a step's tokens is what its loss computed, in the order of the trajectories' turns."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from offbeat.services.errors import CodecError
from offbeat.services.messages.types import StopReason
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.data.token_outcome import TokenOutcome
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.training.batch_log import BatchLog
from offbeat.trainer.training.recorded_steps import TrajectoryTokens, decode_tokens
from offbeat.trainer.training.step_tokens import StepTokens
from tests.copying import replace
from tests.fakes import make_group, train_on
from tests.trainer.training.test_optimizer_step import GROUPS, _sampled, config, trainer, training


def tokens_of(step: StepTokens | None) -> dict[tuple[int, int], TrajectoryTokens]:
    assert step is not None
    return {(each.group, each.index): each for each in decode_tokens(step.encode())}


@pytest.mark.parametrize("settings", [{}, {"ppo_epochs": 2, "actor_train": training(num_minibatches=1)}])
def test_a_tokens_numbers_are_those_of_the_loss_by_hand(folder: Path, settings: dict[str, object]) -> None:
    batches, _, _ = trainer(folder, config(**settings))
    policy = load_policy(folder, ModelArgs(), seed=1)
    train_on(batches, GROUPS, 4)
    found = tokens_of(batches.last_step)
    assert batches.last_step is not None
    assert batches.last_step.version == 5
    assert len(found) == 12
    for group in GROUPS:
        mean = sum(each.reward for each in group.trajectories) / len(group.trajectories)
        for trajectory in group.trajectories:
            logprobs, _, behavior = _sampled(policy, trajectory)
            advantage = trajectory.reward - mean
            ratio = (logprobs - behavior).exp().detach()
            tokens = found[group.number, trajectory.index]
            np.testing.assert_allclose(tokens.logprobs, logprobs.detach(), atol=1e-5)
            np.testing.assert_allclose(tokens.ratio, ratio, rtol=1e-4)
            np.testing.assert_allclose(tokens.advantages, advantage, atol=1e-6)
            clipped = (ratio > 1.2) if advantage > 0 else (ratio < 0.8)
            assert [outcome == TokenOutcome.CLIPPED for outcome in tokens.outcome] == clipped.tolist()
            assert tokens.max_ratio == pytest.approx(float(ratio.max()), rel=1e-4)


def test_a_masked_episode_and_a_filtered_token_say_so(folder: Path) -> None:
    filters = {"filters": ({"agg_type": "token", "ratio_high": 0.67},)}
    cut = replace(GROUPS[0].trajectories[0], stop_reason=StopReason.MAX_LENGTH)
    groups = [replace(GROUPS[0], trajectories=(cut, *GROUPS[0].trajectories[1:])), *GROUPS[1:]]
    batches, _, _ = trainer(folder, config(max_len_mask=True, train_infer_correction=filters))
    train_on(batches, groups, 0)
    found = tokens_of(batches.last_step)
    assert set(found[0, 0].outcome) == {TokenOutcome.EPISODE_MASKED}
    others = np.concatenate([each.outcome for key, each in found.items() if key != (0, 0)])
    ratios = np.concatenate([each.ratio for key, each in found.items() if key != (0, 0)])
    assert ((others == TokenOutcome.FILTERED) == (ratios > 0.67)).all()
    assert 0 < (others == TokenOutcome.FILTERED).sum() < len(others)


def test_a_policy_that_waits_for_its_critic_has_no_numbers(folder: Path) -> None:
    settings = config(adv_estimator="gae", critic_warmup=2)
    batches, _, _ = trainer(folder, settings, critic=True)
    train_on(batches, GROUPS, 0)
    for tokens in tokens_of(batches.last_step).values():
        assert set(tokens.outcome) == {TokenOutcome.NOT_COMPUTED}
        assert np.isnan(tokens.logprobs).all()
        assert math.isnan(tokens.max_ratio)


def test_nothing_is_kept_unless_steps_are_and_weights_are_the_same(folder: Path) -> None:
    kept, one, _ = trainer(folder, config())
    none, two, _ = trainer(folder, config(console={"keep_steps": 0}))
    for step in range(2):
        train_on(kept, GROUPS, step)
        train_on(none, GROUPS, step)
    assert none.last_step is None
    for (_, a), (_, b) in zip(one.tensors(), two.tensors(), strict=True):
        assert torch.equal(a, b)


def test_a_batch_without_tokens_leaves_none_of_the_step_before(folder: Path) -> None:
    batches, _, _ = trainer(folder, config())
    train_on(batches, GROUPS, 0)
    train_on(batches, [], 1)
    assert batches.last_step is None


def test_the_newest_steps_are_kept_beside_their_batches(folder: Path, tmp_path: Path) -> None:
    log = BatchLog(tmp_path, num_shown=2)
    batches, _, _ = trainer(folder, config())
    for step in range(3):
        groups = [make_group(step, rewards=(0.0, 1.0))]
        train_on(batches, groups, step)
        assert batches.last_step is not None
        log.record_tokens(batches.last_step)
    log.flush()
    assert [path.name for path in sorted((tmp_path / "batches").glob("tokens*"))] == [
        "tokens-000002.msgpack",
        "tokens-000003.msgpack",
    ]
    assert log.read_tokens(1) == []
    assert [(each.group, each.index) for each in log.read_tokens(3)] == [(2, 0), (2, 1)]


def test_a_loss_that_can_not_be_explained_ends_no_training(folder: Path, tmp_path: Path) -> None:
    log = BatchLog(tmp_path, num_shown=2)
    batches, _, _ = trainer(folder, config())
    train_on(batches, GROUPS, 0)
    assert batches.last_step is not None
    broken = batches.last_step.config.model_copy(update={"pg_variant": "no_such_module:loss"})
    log.record_tokens(replace(batches.last_step, config=broken))
    log.flush()
    assert log.read_tokens(1) == []


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches" / "tokens-000001.msgpack").write_bytes(b"\x93\x09\x01\x90")
    with pytest.raises(CodecError, match=r"tokens-000001.msgpack can't be read: schema 9"):
        BatchLog(tmp_path).read_tokens(1)
