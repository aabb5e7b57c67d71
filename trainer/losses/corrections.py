"""What the configuration does about tokens that other weights or another engine sampled: weights and masks of a micro-batch.

All tokens of a turn and of a continuous context lie in one micro-batch, so each unit is judged whole however a batch is cut.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.trainer.algorithms.corrections import (
    binary_kl,
    importance_weights,
    inside,
    over_unit,
)
from offbeat.trainer.algorithms.ratio import bounded_exp
from offbeat.trainer.config.corrections import MismatchFilter, TrainInferCorrection
from offbeat.trainer.losses.targets import Targets


class Correction(NamedTuple):
    """weight: [m] float, what the policy loss is multiplied with, None for nothing; kept: [m] bool, tokens that carry policy
    gradient, None for all; cut: [m] bool, tokens whose weight a bound cut, None without weights."""

    weight: Tensor | None
    kept: Tensor | None
    cut: Tensor | None


def correct(config: TrainInferCorrection, logprobs: Tensor, targets: Targets) -> Correction:
    """logprobs: [m] of the policy that is compared with what sampled: the step's start, or the present one."""
    logprobs = logprobs.detach()
    weight = cut = None
    log_ratio = logprobs - targets.behavior_logprobs
    if config.is_weight is not None:
        bounds = config.is_weight
        of_unit = over_unit(log_ratio, bounds.weight_type, targets.turn, targets.sequence)
        weight = importance_weights(of_unit, bounds.lower_bound, bounds.upper_bound)
        cut = bounded_exp(of_unit) != weight
    kept = targets.trusted
    for each in config.filters:
        passed = _passed(each, logprobs, log_ratio, targets)
        kept = passed if kept is None else kept & passed
    return Correction(weight, kept, cut)


def _passed(bounds: MismatchFilter, logprobs: Tensor, log_ratio: Tensor, targets: Targets) -> Tensor:
    def judged(values: Tensor) -> Tensor:
        return over_unit(values, bounds.agg_type, targets.turn, targets.sequence)

    passed = torch.ones_like(log_ratio, dtype=torch.bool)
    if bounds.ratio_low is not None or bounds.ratio_high is not None:
        passed &= inside(bounded_exp(judged(log_ratio)), bounds.ratio_low, bounds.ratio_high)
    if bounds.diff_low is not None or bounds.diff_high is not None:
        difference = logprobs.exp() - targets.behavior_logprobs.exp()
        passed &= inside(judged(difference), bounds.diff_low, bounds.diff_high)
    if bounds.binary_kl_high is not None:
        passed &= inside(judged(binary_kl(logprobs, targets.behavior_logprobs)), None, bounds.binary_kl_high)
    return passed
