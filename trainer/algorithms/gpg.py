"""Group policy gradient (arXiv:2504.02546)."""

from torch import Tensor


def informative_share_inverse(informative: Tensor, num_masked: int = 0) -> float:
    """Return alpha = B / (B - M) (eq. 9), 1 without any signal.

    informative: [T] bool, of groups with a signal; num_masked: further trajectories without signal
    """
    count = int(informative.sum())
    return (len(informative) + num_masked) / count if count else 1.0
