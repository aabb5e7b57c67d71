"""What rank 0 says to the others is what it does itself."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from offbeat.services.messages.types import Group
from offbeat.services.telemetry import Partial
from offbeat.trainer.algorithms.aggregation import MaskedCounts
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.process import ranks as peers
from tests.fakes import FakeTrainer, make_group


class Listening(FakeTrainer):
    """Keeps what it is told to train on."""

    def train(
        self, groups: Sequence[Group], step: int, silent: MaskedCounts, weights: Sequence[float] = ()
    ) -> dict[str, Partial]:
        self.told: Any = (
            [(g.number, g.temperature, [t.reward for t in g.trajectories]) for g in groups], step, silent, list(weights)
        )  # fmt: skip
        return {}


def test_followers_train_on_the_leaders_groups_with_their_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    wire: list[bytes] = []

    def broadcast(ranks: Ranks, message: bytes = b"") -> bytes:
        if ranks.rank == 0:
            wire.append(message)
            return message
        return wire.pop(0)

    monkeypatch.setattr(peers, "broadcast", broadcast)
    first, second = Listening(), Listening()
    leader = peers.RankZeroTrainer(first, Ranks(0, 0, 2, torch.device("cpu")))
    groups = [make_group(n, rewards=(0.0, 1.0, n)) for n in (3, 5)]
    leader.train(groups, 7, MaskedCounts(16, 4), [1.0, 0.25])
    leader.stop_followers()
    peers.follow_rank_zero(second, Ranks(1, 1, 2, torch.device("cpu")))
    assert first.told == second.told == (
        [(3, None, [0.0, 1.0, 3.0]), (5, None, [0.0, 1.0, 5.0])], 7, MaskedCounts(16, 4), [1.0, 0.25]
    )  # fmt: skip
    assert not wire
