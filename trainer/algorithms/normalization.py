from typing import NamedTuple

import torch
from torch import Tensor

EPS = 1e-6


class Moments(NamedTuple):
    """Statistics per reward, [T] float64."""

    mean: Tensor
    std: Tensor
    size: Tensor


def sum_by_group(values: Tensor, group: Tensor) -> Tensor:
    """Sum values per group: [T] -> [G] float64."""
    num_groups = int(group.max()) + 1 if len(group) else 0
    return torch.zeros(num_groups, dtype=torch.float64).index_add_(0, group, values.double())


def constant_groups(values: Tensor, group: Tensor) -> Tensor:
    """Return where all values of the group are equal: [T] -> [T] bool."""
    num_groups = int(group.max()) + 1 if len(group) else 0
    extremes = values.new_zeros(num_groups)
    low = extremes.scatter_reduce(0, group, values, "amin", include_self=False)
    high = extremes.scatter_reduce(0, group, values, "amax", include_self=False)
    return (low == high)[group]


def group_moments(rewards: Tensor, group: Tensor) -> Moments:
    """Return mean, unbiased standard deviation (0 for one member) and size of each reward's group, in float64.

    Equal rewards have exactly their value as mean, and deviation 0.
    """
    values = rewards.double()
    size = sum_by_group(torch.ones_like(values), group)
    mean = (sum_by_group(values, group) / size.clamp(min=1))[group]
    mean = torch.where(constant_groups(rewards, group), values, mean)
    variance = sum_by_group((values - mean).square(), group) / (size - 1).clamp(min=1)
    return Moments(mean, variance.sqrt()[group], size[group])


def normalize(rewards: Tensor, center: Moments | None, scale: Moments | None) -> Tensor:
    """Return (r - mean) / (std + eps), [T]; None skips a part.

    Groupings may differ (Lite PPO, arXiv:2508.08221). A group of one, or deviation 0, gives 0.
    """
    out = rewards.double()
    if center is not None:
        out = torch.where(center.size > 1, out - center.mean, 0.0)
    if scale is not None:
        out = torch.where(scale.std > EPS, out / (scale.std + EPS), 0.0)
    return out.to(rewards)


def normalize_by_group(rewards: Tensor, group: Tensor, *, center: bool = True, scale: bool = False) -> Tensor:
    """Center rewards on their group's mean (Dr. GRPO, arXiv:2503.20783) and, with `scale`, divide by the deviation
    (GRPO, arXiv:2402.03300). All [T].
    """
    moments = group_moments(rewards, group)
    return normalize(rewards, moments if center else None, moments if center and scale else None)


class RunningMoments:
    """Running moments per key (Chan et al. 1979)."""

    def __init__(self) -> None:
        self._by_key: dict[str, tuple[float, float, float]] = {}

    def update(self, key: str, rewards: Tensor) -> None:
        if not len(rewards):
            return
        values = rewards.to(torch.float64)
        count, mean, squares = self._by_key.get(key, (0.0, 0.0, 0.0))
        new_count, new_mean = float(len(values)), float(values.mean())
        total, shift = count + new_count, new_mean - mean
        squares += float((values - new_mean).square().sum()) + shift**2 * count * new_count / total
        self._by_key[key] = (total, mean + shift * new_count / total, squares)

    def moments(self, keys: list[str]) -> Moments:
        """Return the moments of T keys; an unknown one has size 0."""
        rows = [self._by_key.get(key, (0.0, 0.0, 0.0)) for key in keys]
        table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)
        size, mean, squares = table.T
        std = (squares / (size - 1).clamp(min=1)).sqrt()
        return Moments(mean, std, size)

    def state_dict(self) -> dict[str, list[float]]:
        return {key: list(moments) for key, moments in self._by_key.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self._by_key = {key: (count, mean, squares) for key, (count, mean, squares) in state.items()}


def whiten(values: Tensor) -> Tensor:
    """Scale values [M] to zero mean and unit (unbiased) deviation, in float64; equal ones give 0; one value is
    unchanged.
    """
    if len(values) < 2:
        return values
    if bool(values.min() == values.max()):
        return torch.zeros_like(values)
    exact = values.double()
    return ((exact - exact.mean()) / (exact.std() + EPS)).to(values)


def has_signal(rewards: Tensor) -> bool:
    return len(rewards) > 1 and bool((rewards - rewards[0]).abs().max() > EPS)
