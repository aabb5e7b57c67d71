"""Importance weights and masks, as configured; micro-batches never split a turn or sequence."""

from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.trainer.algorithms.corrections import (
    binary_kl,
    importance_weights,
    reduce_over_unit,
    within_bounds,
)
from offbeat.trainer.algorithms.ratio import bounded_exp
from offbeat.trainer.config.corrections import MismatchFilter, TrainInferCorrection
from offbeat.trainer.data.user_functions import correct_tokens
from offbeat.trainer.losses.targets import Targets


class Correction(NamedTuple):
    """All [m]. weight: factor of the policy loss; kept: bool, tokens with policy gradient, None for all; cut: bool,
    truncated weights.
    """

    weight: Tensor | None
    kept: Tensor | None
    cut: Tensor | None


def correct(config: TrainInferCorrection, logprobs: Tensor, targets: Targets) -> Correction:
    """Compute weights and masks. logprobs: [m], at the start of the step or current."""
    logprobs = logprobs.detach()
    weight = cut = None
    log_ratio = logprobs - targets.behavior_logprobs
    if config.is_weight is not None:
        bounds = config.is_weight
        unit_log_ratio = reduce_over_unit(log_ratio, bounds.weight_type, targets.turn, targets.sequence)
        weight = importance_weights(unit_log_ratio, bounds.lower_bound, bounds.upper_bound)
        cut = bounded_exp(unit_log_ratio) != weight
    kept = targets.trusted
    for mismatch_filter in config.filters:
        passed = _apply_filter(mismatch_filter, logprobs, log_ratio, targets)
        kept = passed if kept is None else kept & passed
    if config.function is not None:
        own, passed = correct_tokens(
            config.function, logprobs, targets.behavior_logprobs, targets.turn, targets.sequence
        )
        if own is not None:
            weight = own if weight is None else weight * own
        kept = passed if kept is None else kept if passed is None else kept & passed
    return Correction(weight, kept, cut)


def _apply_filter(bounds: MismatchFilter, logprobs: Tensor, log_ratio: Tensor, targets: Targets) -> Tensor:
    def aggregate(values: Tensor) -> Tensor:
        return reduce_over_unit(values, bounds.agg_type, targets.turn, targets.sequence)

    passed = torch.ones_like(log_ratio, dtype=torch.bool)
    if bounds.ratio_low is not None or bounds.ratio_high is not None:
        passed &= within_bounds(bounded_exp(aggregate(log_ratio)), bounds.ratio_low, bounds.ratio_high)
    if bounds.diff_low is not None or bounds.diff_high is not None:
        difference = logprobs.exp() - targets.behavior_logprobs.exp()
        passed &= within_bounds(aggregate(difference), bounds.diff_low, bounds.diff_high)
    if bounds.binary_kl_high is not None:
        passed &= within_bounds(aggregate(binary_kl(logprobs, targets.behavior_logprobs)), None, bounds.binary_kl_high)
    return passed
