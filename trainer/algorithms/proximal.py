"""Proximal policy of decoupled PPO without an extra forward pass (AReaL's `prox_logp_method: loglinear`)."""

import torch
from torch import Tensor


def proximal_share(versions: Tensor, version: int) -> Tensor:
    """Return alpha = (v_prox - v_behave) / (v_theta - v_behave), with v_prox the version before this batch and v_theta the
    one after it; 0 for tokens sampled by v_prox.

    versions: [M] int64, the version that sampled each token; version: v_prox -> [M] float32 in [0, 1)
    """
    age = (version - versions).clamp(min=0).to(torch.float32)
    return age / (age + 1.0)


def proximal_logprobs(logprobs: Tensor, behavior_logprobs: Tensor, share: Tensor) -> Tensor:
    """Return log pi_behave + alpha (log pi - log pi_behave), detached. All [M] float."""
    return behavior_logprobs + share * (logprobs.detach() - behavior_logprobs)
