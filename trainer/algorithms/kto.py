"""KTO (arXiv:2402.01306): responses without partners."""

import torch
from torch import Tensor


def kto(
    ratios: Tensor, desirable: Tensor, kl: float, beta: float, desirable_weight: float, undesirable_weight: float
) -> Tensor:
    """Return the weighted 1 - sigmoid of the response's reward above or below the reference point `kl`.

    ratios: [P], policy's less reference's logprob; desirable: [P] bool; kl: of the policy to the reference, a constant
    -> [P]
    """
    gain = beta * (ratios - kl)
    weight = ratios.new_tensor([undesirable_weight, desirable_weight])[desirable.long()]
    return weight * (1 - torch.sigmoid(torch.where(desirable, gain, -gain)))
