# pyright: basic
from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from offbeat.services.messages.types import Sampling


def sample(logits: Tensor, parameters: Sequence[Sampling], generator: Generator) -> tuple[list[int], list[float]]:
    """Sample from logits [n, V] -> ids and their logprobs under the sampled distribution; greedy ones under the
    model's."""
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
    return ids.tolist(), logprobs.gather(-1, ids[:, None])[:, 0].tolist()


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
