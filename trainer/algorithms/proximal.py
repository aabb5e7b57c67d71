"""Interpolated proximal policy of decoupled PPO (AReaL's `prox_logp_method: loglinear`)."""

import torch
from torch import Tensor


def proximal_share(versions: Tensor, version: int) -> Tensor:
    """Return alpha = (v_prox - v_behave) / (v_theta - v_behave), v_theta = v_prox + 1: [M] in [0, 1).

    versions: [M] int64; version: v_prox, before this batch
    """
    age = (version - versions).clamp(min=0).to(torch.float32)
    return age / (age + 1.0)


def proximal_logprobs(logprobs: Tensor, behavior_logprobs: Tensor, share: Tensor) -> Tensor:
    """Return log pi_behave + alpha (log pi - log pi_behave), detached. All [M]."""
    return behavior_logprobs + share * (logprobs.detach() - behavior_logprobs)
