"""Responses of the policy in place of a row's (GKD's mixture, arXiv:2306.13649).

Invariants: the seed and a group's number decide whether it is sampled; a sampled response ends the trajectory.
"""

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
from msgspec import structs

from offbeat.services.messages.types import (
    Completion,
    FinishReason,
    PromptImage,
    Segment,
    StopReason,
    Trajectory,
    Turn,
    VersionSpan,
)

SAMPLED = "sampled"
"""Metric of a trajectory: 1 if its response is the policy's."""
SAMPLING_SEED_STREAM = 0x6D1C
"""Distinct from other uses of the seed."""

Sample = Callable[[Sequence[int], int, tuple[PromptImage, ...]], Awaitable[Completion]]
"""(prompt, maximum number of new tokens, images of the prompt) -> completion."""


def is_sampled(number: int, seed: int, share: float) -> bool:
    return float(np.random.default_rng([seed, SAMPLING_SEED_STREAM, number]).random()) < share


def mark_given(trajectory: Trajectory) -> Trajectory:
    """Mark a trajectory as a row's own response."""
    return structs.replace(trajectory, metrics={**trajectory.metrics, SAMPLED: 0.0})


async def sample_response(
    trajectory: Trajectory, sample: Sample, *, max_new_tokens: int, max_tokens: int
) -> Trajectory:
    """Return the row's prompt, up to its last turn, with a sampled response; unchanged without learned tokens."""
    if not trajectory.turns or not trajectory.num_sampled:
        return trajectory
    last = trajectory.turns[-1]
    row = trajectory.segments[last.segment]
    prompt, images = row.tokens[: last.start], tuple(image for image in row.images if image.start < last.start)
    completion = await sample(prompt.tolist(), min(max_new_tokens, max_tokens - len(prompt)), images)
    start, end = len(prompt), len(prompt) + len(completion.token_ids)
    tokens = np.concatenate([prompt, np.array(completion.token_ids, dtype=np.int32)])
    mask, logprobs = np.zeros(end, dtype=np.bool_), np.zeros(end, dtype=np.float32)
    mask[start:], logprobs[start:] = True, completion.logprobs
    spans = tuple(VersionSpan(start + first, start + stop, version) for first, stop, version in completion.versions)
    is_cut = completion.finish_reason is FinishReason.LENGTH
    return structs.replace(
        trajectory,
        segments=(Segment(tokens, mask, logprobs, spans, images),),
        turns=(Turn(0, start, end, 0.0, is_truncated=is_cut),),
        stop_reason=StopReason.TERMINATED,
        metrics={**trajectory.metrics, SAMPLED: 1.0},
    )
