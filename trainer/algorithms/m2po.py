"""Second-moment trust policy optimization (M2PO, arXiv:2510.01161)."""

import torch
from torch import Tensor


def second_moment_mask(log_ratio: Tensor, threshold: float) -> Tensor:
    """Return a mask that drops the largest (log pi/pi_behavior)^2, equal ones together, until the others' mean is at
    most `threshold`: [M] -> [M] bool.
    """
    if not len(log_ratio):
        return torch.ones(0, dtype=torch.bool, device=log_ratio.device)
    moment = log_ratio.detach().to(torch.float64).square()
    ordered = moment.sort().values
    counts = torch.arange(1, len(ordered) + 1, device=ordered.device)
    allowed = ordered.cumsum(0) / counts <= threshold
    # Running means of ascending values ascend, so the allowed ones form a prefix
    num_kept = int(allowed.sum())
    if num_kept == len(ordered):
        return torch.ones_like(moment, dtype=torch.bool)
    return moment < ordered[num_kept]
