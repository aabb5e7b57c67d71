"""Follower ranks make the calls of rank 0 with the same arguments."""

import pytest
import torch

from offbeat.services.telemetry import Partial
from offbeat.trainer.algorithms.aggregation import MaskedCounts
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.data.step_batch import StepBatch
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.process import ranks as rank_calls
from tests.fakes import FakeTrainer, make_group

CONFIG = AlgorithmConfig.model_validate({"reward_shaping": {"response_length_penalty_coef": 0.5}})


class RecordingTrainer(FakeTrainer):
    """Keeps the last batch."""

    def train(self, batch: StepBatch) -> dict[str, Partial]:
        self.batch = batch
        return {}


def test_followers_train_on_rank_zeros_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    wire: list[bytes] = []

    def broadcast(ranks: Ranks, message: bytes = b"") -> bytes:
        if ranks.rank == 0:
            wire.append(message)
            return message
        return wire.pop(0)

    monkeypatch.setattr(rank_calls, "broadcast", broadcast)
    trainer, follower = RecordingTrainer(), RecordingTrainer()
    groups = [make_group(n, rewards=(0.0, 1.0, n)) for n in (3, 5)]
    batch = StepBatch.build(7, groups, CONFIG, masked=MaskedCounts(16, 4), weights=[1.0, 0.25])
    with rank_calls.lead(trainer, Ranks(0, 0, 2, torch.device("cpu"))) as leader:
        leader.train(batch)
    rank_calls.follow_rank_zero(follower, Ranks(1, 1, 2, torch.device("cpu")), CONFIG)
    assert trainer.batch is batch
    assert not wire

    def view(batch: StepBatch) -> object:
        rewards = [[[t.reward for t in g.trajectories] for g in groups] for groups in (batch.groups, batch.shaped)]
        return batch.step, batch.masked, batch.weights, [(g.number, g.temperature) for g in batch.groups], rewards

    assert view(follower.batch) == view(batch)


def test_a_single_rank_encodes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(rank_calls, "broadcast")
    monkeypatch.delattr(StepBatch, "pack")
    trainer = RecordingTrainer()
    batch = StepBatch.build(0, [make_group(0)], CONFIG)
    with rank_calls.lead(trainer, Ranks(0, 0, 1, torch.device("cpu"))) as leader:
        leader.train(batch)
    assert trainer.batch is batch
