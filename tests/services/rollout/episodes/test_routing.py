"""An engine sends the experts that the worker lacks, and each turn has those of its whole prompt."""

from dataclasses import replace

import numpy as np
import pytest

from offbeat.services.messages.types import Completion, GenerateRequest, Sampling
from offbeat.services.rollout.episodes.sampler import EpisodeSampler
from offbeat.services.rollout.episodes.turn_batcher import TurnBatcher
from tests.fakes_rollout import FakeGeneration


class RoutedGeneration(FakeGeneration):
    """Generation whose experts of a token are its position and the call."""

    def _complete(self, request: GenerateRequest) -> Completion:
        completion = super()._complete(request)
        end = len(request.prompt) + len(completion.token_ids) - 1
        rows = [[[position, len(self.calls)]] for position in range(request.routing_start, end)]
        return replace(completion, routing=np.array(rows, dtype=np.uint8))


@pytest.mark.parametrize(
    ("later", "start"),
    [
        ((1, 2, 9, 3, 4, 5), 3),  # the last sampled token was not computed
        ((1, 2, 9, 7, 4, 5), 3),
        ((1, 2, 8, 3, 4, 5), 2),  # another answer in its place
        ((6, 2, 9, 3), 0),
        ((1,), 1),
    ],
)
async def test_a_turn_asks_for_the_experts_behind_the_tokens_that_it_shares(later: tuple[int, ...], start: int) -> None:
    client = RoutedGeneration(lambda _: (9, 3))
    sample = EpisodeSampler(
        TurnBatcher(client, 0.0, 5.0), Sampling(max_new_tokens=4, stop_token_ids=(3,)), 2, retry_s=5.0
    )
    first = await sample((1, 2), 4)
    second = await sample(later, 4)
    assert [call[0].routing_start for call in client.calls] == [0, start]
    for completion, prompt, turns in (
        (first, (1, 2), [1] * 3),
        (second, later, [1] * start + [2] * (len(later) + 1 - start)),
    ):
        assert completion.routing is not None
        assert completion.routing[:, 0, 0].tolist() == list(range(len(prompt) + 1))
        assert completion.routing[:, 0, 1].tolist() == turns


async def test_turns_without_experts_ask_as_before() -> None:
    client = FakeGeneration(lambda _: (9, 3))
    sample = EpisodeSampler(
        TurnBatcher(client, 0.0, 5.0), Sampling(max_new_tokens=4, stop_token_ids=(3,)), 2, retry_s=5.0
    )
    for prompt in ((1, 2), (1, 2, 9, 3, 4)):
        assert (await sample(prompt, 4)).routing is None
    assert [call[0].routing_start for call in client.calls] == [0, 0]
