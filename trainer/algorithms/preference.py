"""Losses of pairs of a chosen and a rejected response, [P] in and out."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class PairLogprobs(NamedTuple):
    """Logprobs of a response under policy and reference, summed or averaged, [P]."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor

    @property
    def margin(self) -> Tensor:
        """Return the log-ratio of the chosen less that of the rejected response."""
        return (self.chosen - self.ref_chosen) - (self.rejected - self.ref_rejected)


class PreferenceTerms(NamedTuple):
    """Constants of the losses."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.5


def sigmoid(pairs: PairLogprobs, terms: PreferenceTerms) -> Tensor:
    """DPO (arXiv:2305.18290); conservative DPO with label smoothing."""
    logits, swapped = terms.beta * pairs.margin, terms.label_smoothing
    return -(1 - swapped) * logsigmoid(logits) - swapped * logsigmoid(-logits)


def robust(pairs: PairLogprobs, terms: PreferenceTerms) -> Tensor:
    """Unbiased under swapped labels (arXiv:2403.00409)."""
    logits, swapped = terms.beta * pairs.margin, terms.label_smoothing
    return (-(1 - swapped) * logsigmoid(logits) + swapped * logsigmoid(-logits)) / (1 - 2 * swapped)


def hinge(pairs: PairLogprobs, terms: PreferenceTerms) -> Tensor:
    """SLiC-HF (arXiv:2305.10425)."""
    return torch.relu(1 - terms.beta * pairs.margin)


def ipo(pairs: PairLogprobs, terms: PreferenceTerms) -> Tensor:
    """IPO (arXiv:2310.12036), on mean logprobs."""
    return (pairs.margin - 1 / (2 * terms.beta)).square()


def simpo(pairs: PairLogprobs, terms: PreferenceTerms) -> Tensor:
    """SimPO (arXiv:2405.14734): mean logprobs without reference, with a target margin."""
    return -logsigmoid(terms.beta * (pairs.chosen - pairs.rejected) - terms.gamma)


def orpo(pairs: PairLogprobs, terms: PreferenceTerms) -> Tensor:
    """ORPO (arXiv:2403.07691): negative log-likelihood and odds ratio, on mean logprobs."""
    odds = (pairs.chosen - pairs.rejected) - (_log_complement(pairs.chosen) - _log_complement(pairs.rejected))
    return -pairs.chosen - terms.beta * logsigmoid(odds)


def apo_zero(pairs: PairLogprobs, terms: PreferenceTerms) -> Tensor:
    """APO-zero (arXiv:2408.06266): chosen responses up, rejected ones down."""
    chosen, rejected = pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected
    return 1 - torch.sigmoid(terms.beta * chosen) + torch.sigmoid(terms.beta * rejected)


def apo_down(pairs: PairLogprobs, terms: PreferenceTerms) -> Tensor:
    """APO-down (arXiv:2408.06266): both down, rejected ones more."""
    chosen, rejected = pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected
    return torch.sigmoid(terms.beta * chosen) + 1 - torch.sigmoid(terms.beta * (chosen - rejected))


def _log_complement(logprobs: Tensor) -> Tensor:
    """Return log(1 - exp(logprobs)), with logprobs at most -eps: at 0 it is infinite, and its gradient NaN."""
    return torch.log(-torch.expm1(logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)))


PREFERENCE_LOSSES: dict[str, Callable[[PairLogprobs, PreferenceTerms], Tensor]] = {
    "sigmoid": sigmoid,
    "robust": robust,
    "hinge": hinge,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
}
"""By `dpo.loss_type`."""
