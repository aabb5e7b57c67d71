# pyright: basic
"""Distributions of sampled tokens, and the log-probabilities of those that `generate` draws.

Invariant: of each token one number is kept, not its distribution.
"""

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


def make_warpers(temperature: float, top_p: float, top_k: int) -> LogitsProcessorList:
    """Return what makes logits those that are sampled; values as in `SamplingParams`."""
    warpers = LogitsProcessorList()
    if temperature > 0:
        warpers.append(TemperatureLogitsWarper(temperature))
        if top_k > 0:
            warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            warpers.append(TopPLogitsWarper(top_p))
    return warpers


class LogprobRecorder:
    """Last processor of `generate`: the token of each distribution is the newest one at the next."""

    def __init__(self) -> None:
        self._scores: Tensor | None = None
        self._logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._record(input_ids)
        self._scores = scores
        return scores

    def finish(self, sequences: Tensor) -> Tensor:
        """Return log-probabilities [B, T] of all tokens that were drawn."""
        self._record(sequences)
        return torch.stack(self._logprobs, dim=1)

    def _record(self, sequences: Tensor) -> None:
        if self._scores is not None:
            logprobs = self._scores.float().log_softmax(dim=-1)
            self._logprobs.append(logprobs.gather(-1, sequences[:, -1:])[:, 0])
