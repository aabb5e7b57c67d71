# pyright: basic
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from offbeat.services.generation.engine import TopTokens
from offbeat.services.messages.types import Sampling


class SampledTokens(NamedTuple):
    """logprobs: of the ids; distributions: [n, V] logprobs."""

    ids: list[int]
    logprobs: list[float]
    distributions: Tensor


def sample(logits: Tensor, parameters: Sequence[Sampling], generator: Generator) -> SampledTokens:
    """Sample from logits [n, V]; logprobs are of the sampled distribution, of greedy rows the model's."""
    temperature = torch.tensor([each.temperature for each in parameters])[:, None]
    is_greedy = temperature == 0
    scaled = logits.float() / torch.where(is_greedy, 1.0, temperature)
    top_k = [0 if each.temperature == 0 else max(each.top_k, 0) for each in parameters]
    top_p = [1.0 if each.temperature == 0 else each.top_p for each in parameters]
    if any(top_k) or min(top_p) < 1:
        scaled = truncate(scaled, torch.tensor(top_k)[:, None], torch.tensor(top_p)[:, None])
    logprobs = scaled.log_softmax(-1)
    # the exponential race: argmax of p / Exp(1) is a sample of p
    noise = torch.empty_like(logprobs).exponential_(generator=generator)
    ids = torch.where(is_greedy[:, 0], scaled.argmax(-1), (logprobs.exp() / noise).argmax(-1))
    return SampledTokens(ids.tolist(), logprobs.gather(-1, ids[:, None])[:, 0].tolist(), logprobs)


def find_top(logprobs: Tensor, count: int) -> list[TopTokens]:
    """Return the `count` most likely tokens of each row, [n, V], fewer if others can't be sampled."""
    if not count:
        return []
    best, ids = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    possible = (best > -math.inf).sum(-1).tolist()
    rows = zip(ids.tolist(), best.tolist(), possible, strict=True)
    return [TopTokens(tokens[:n], values[:n]) for tokens, values, n in rows]


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Mask all but the `top_k` [n, 1] most likely (0: all), then those beyond a mass of `top_p` [n, 1]."""
    vocabulary = logits.shape[-1]
    ordered, order = logits.sort(-1, descending=True)
    kept = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    ordered = ordered.masked_fill(ordered < ordered.gather(-1, kept - 1), -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    ordered = ordered.masked_fill((before >= top_p) & (top_p < 1), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered)
