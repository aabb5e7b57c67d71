"""Effect of a step's policy loss on each sampled token."""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.losses.corrections import correct
from offbeat.trainer.losses.policy_loss import compared_logprobs, surrogate_losses
from offbeat.trainer.losses.targets import Targets


class TokenOutcome(IntEnum):
    """Why a token's policy gradient is not that of its advantage; the last reason that applies."""

    TRAINED = 0
    NO_ADVANTAGE = 1
    """Advantage 0."""
    CLIPPED = 2
    """`pg_variant` bounded its gradient or weight."""
    WEIGHT_CUT = 3
    """`train_infer_correction.is_weight` bounded its weight."""
    FILTERED = 4
    """Masked by a filter of `train_infer_correction`."""
    EPISODE_MASKED = 5
    """Its episode is outside the loss (`max_len_mask`, `error_max_len_clip`)."""
    NOT_COMPUTED = 6
    """Policy not trained on it (`critic_warmup`)."""


@dataclass(frozen=True, slots=True)
class TokenOutcomes:
    """All [M]. ratio: as in the loss, to the old policy; outcome: `TokenOutcome`, uint8."""

    logprobs: Tensor
    ratio: Tensor
    advantages: Tensor
    outcome: Tensor


@torch.no_grad()
def token_outcomes(config: AlgorithmConfig, logprobs: Tensor, targets: Targets) -> TokenOutcomes:
    """Explain the first pass. logprobs: [M], NaN if missing."""
    surrogate, old = surrogate_losses(config, logprobs, targets)
    correction = correct(config.train_infer_correction, compared_logprobs(config, logprobs, old), targets)
    outcome = torch.full(logprobs.shape, TokenOutcome.TRAINED, dtype=torch.uint8)
    outcome[targets.advantages == 0] = TokenOutcome.NO_ADVANTAGE
    outcome[surrogate.clipped] = TokenOutcome.CLIPPED
    if correction.cut is not None:
        outcome[correction.cut] = TokenOutcome.WEIGHT_CUT
    if correction.kept is not None:
        outcome[~correction.kept] = TokenOutcome.FILTERED
    outcome[targets.weights == 0] = TokenOutcome.EPISODE_MASKED
    outcome[logprobs.isnan()] = TokenOutcome.NOT_COMPUTED
    return TokenOutcomes(logprobs, surrogate.ratio, targets.advantages, outcome)
