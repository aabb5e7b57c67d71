"""Second-moment trust policy optimisation (M2PO, arXiv:2510.01161)."""

import torch
from torch import Tensor


def second_moment_mask(log_ratio: Tensor, threshold: float) -> Tensor:
    """Keep as many tokens as leave the mean of (log pi/pi_behavior)^2 at most at `threshold`; the largest go first.

    Only outliers go, so nearly all of a stale batch stays. Equal values go or stay together, whatever their order.

    log_ratio: [M] float -> [M] bool
    """
    if not len(log_ratio):
        return torch.ones(0, dtype=torch.bool, device=log_ratio.device)
    moment = log_ratio.detach().to(torch.float64).square()
    ordered = moment.sort().values
    counts = torch.arange(1, len(ordered) + 1, device=ordered.device)
    allowed = ordered.cumsum(0) / counts <= threshold
    # Means of ascending values ascend, so the allowed ones are a beginning
    num_kept = int(allowed.sum())
    if num_kept == len(ordered):
        return torch.ones_like(moment, dtype=torch.bool)
    return moment < ordered[num_kept]
