"""A share of rows has the policy's response in place of its own."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from offbeat.services.messages.types import Completion, FinishReason, PromptImage, Trajectory, VersionSpan
from offbeat.services.rollout.data.sampled import SAMPLED, is_sampled, mark_given, sample_response
from tests.trainer.trajectories import trajectory

ROW = trajectory(0, [(3, 2, 0.0), (2, 4, 0.0)], versions=(5, 5))
PROMPTED = (PromptImage(0, 1, b"first"), PromptImage(5, 2, b"second"))
REPLY = Completion("r", (70, 71, 72), (-0.5, -0.25, 0.0), (VersionSpan(0, 1, 5), VersionSpan(1, 3, 6)))


def sample(row: Trajectory, reply: Completion, max_tokens: int = 64) -> tuple[Trajectory, list[tuple[list[int], int]]]:
    asked: list[tuple[list[int], int]] = []

    async def answer(prompt: Sequence[int], max_new_tokens: int, images: tuple[PromptImage, ...]) -> Completion:
        asked.append((list(prompt), max_new_tokens))
        assert images == tuple(image for segment in row.segments for image in segment.images if image in PROMPTED)
        return reply

    return asyncio.run(sample_response(row, answer, max_new_tokens=10, max_tokens=max_tokens)), asked


def test_the_last_response_is_replaced_and_earlier_turns_are_its_prompt():
    sampled, asked = sample(ROW, REPLY)
    (segment,), (turn,) = sampled.segments, sampled.turns
    assert asked == [(list(range(7)), 10)]
    assert segment.tokens.tolist() == [*range(7), 70, 71, 72]
    assert segment.loss_mask.tolist() == [False] * 7 + [True] * 3
    assert segment.logprobs[7:].tolist() == [-0.5, -0.25, 0.0]
    assert segment.token_versions()[7:].tolist() == [5, 6, 6]
    assert (turn.start, turn.end, turn.is_truncated) == (7, 10, False)
    assert sampled.metrics == {SAMPLED: 1.0}
    assert mark_given(ROW).metrics == {SAMPLED: 0.0}


def test_a_sampled_response_has_the_images_of_its_prompt():
    segment = replace(ROW.segments[0], images=(*PROMPTED, PromptImage(8, 1, b"in the response")))
    sampled, asked = sample(structs.replace(ROW, segments=(segment,)), REPLY)
    assert len(asked) == 1
    assert sampled.segments[0].images == PROMPTED


def test_a_response_ends_within_the_sequence_length():
    cut = Completion("r", (70, 71), (-0.5, -0.25), (VersionSpan(0, 2, 5),), FinishReason.LENGTH)
    sampled, asked = sample(ROW, cut, max_tokens=9)
    assert asked[0][1] == 2
    assert sampled.is_truncated


def test_a_row_without_learned_tokens_stays_as_it_is():
    row = trajectory(0, [(3, 0, 0.0)])
    assert sample(row, REPLY) == (row, [])


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_seed_and_the_number_decide(share: float):
    drawn = [is_sampled(number, 4, share) for number in range(2000)]
    assert drawn == [is_sampled(number, 4, share) for number in range(2000)]
    assert np.mean(drawn) == pytest.approx(share, abs=0.04)
    assert share in (0, 1) or drawn != [is_sampled(number, 5, share) for number in range(2000)]
