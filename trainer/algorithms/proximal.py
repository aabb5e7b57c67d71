"""The proximal policy of decoupled PPO, without a forward pass for it (AReaL's `prox_logp_method: loglinear`)."""

import torch
from torch import Tensor


def proximal_share(versions: Tensor, version: int) -> Tensor:
    """alpha = (v_prox - v_behave) / (v_theta - v_behave), with v_prox the version before this batch and v_theta the one that
    the batch makes; 0 where the token is of v_prox itself.

    versions: [M] int64, of what sampled each token; version: of the weights before the batch -> [M] float32 in [0, 1)
    """
    age = (version - versions).clamp(min=0).to(torch.float32)
    return age / (age + 1.0)


def proximal_logprobs(logprobs: Tensor, behavior_logprobs: Tensor, share: Tensor) -> Tensor:
    """log pi_behave + alpha (log pi - log pi_behave), detached. All [M] float."""
    return behavior_logprobs + share * (logprobs.detach() - behavior_logprobs)
