"""Bradley-Terry model of preferences (Bradley and Terry 1952; InstructGPT, arXiv:2203.02155)."""

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor, center_coef: float = 0.0) -> Tensor:
    """Return the negative log-likelihood that the chosen response wins by `margin` (Llama 2, arXiv:2307.09288).

    center_coef: of the squared sum of both rewards, which keeps their mean at 0 (arXiv:2312.09244). All [P].
    """
    return -logsigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected).square()
