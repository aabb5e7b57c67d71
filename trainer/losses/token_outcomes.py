"""Effect of a step's policy loss on each sampled token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.data.token_outcome import TokenOutcome
from offbeat.trainer.losses.corrections import correct
from offbeat.trainer.losses.policy_loss import compared_logprobs, surrogate_losses
from offbeat.trainer.losses.targets import Targets


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
