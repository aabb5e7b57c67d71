"""Normalization of rewards and advantages."""

from typing import NamedTuple

import torch
from torch import Tensor

EPS = 1e-6


class Moments(NamedTuple):
    """Statistics per reward, all [T]."""

    mean: Tensor
    std: Tensor
    size: Tensor


def group_moments(rewards: Tensor, group: Tensor) -> Moments:
    """Return mean, unbiased standard deviation (0 for one member) and size of each reward's group. All [T]."""
    if not len(rewards):
        return Moments(rewards.clone(), rewards.clone(), rewards.clone())
    size = torch.bincount(group).to(rewards.dtype)
    mean = (torch.zeros_like(size).index_add_(0, group, rewards) / size.clamp(min=1))[group]
    centered = rewards - mean
    variance = torch.zeros_like(size).index_add_(0, group, centered.square()) / (size - 1).clamp(min=1)
    return Moments(mean, variance.sqrt()[group], size[group])


def normalize(rewards: Tensor, center: Moments | None, scale: Moments | None) -> Tensor:
    """Return (r - mean) / (std + eps), [T]; None skips a part.

    Groupings may differ (Lite PPO, arXiv:2508.08221). A group of one, or deviation 0, gives 0.
    """
    out = rewards.clone()
    if center is not None:
        out = torch.where(center.size > 1, rewards - center.mean, torch.zeros_like(rewards))
    if scale is not None:
        out = torch.where(scale.std > EPS, out / (scale.std + EPS), torch.zeros_like(out))
    return out


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
        """Add rewards [n]."""
        if not len(rewards):
            return
        values = rewards.to(torch.float64)
        count, mean, squares = self._by_key.get(key, (0.0, 0.0, 0.0))
        new_count, new_mean = float(len(values)), float(values.mean())
        total, shift = count + new_count, new_mean - mean
        squares += float((values - new_mean).square().sum()) + shift**2 * count * new_count / total
        self._by_key[key] = (total, mean + shift * new_count / total, squares)

    def moments(self, keys: list[str], like: Tensor) -> Moments:
        """Return statistics for T keys; unknown keys have size 0."""
        rows = [self._by_key.get(key, (0.0, 0.0, 0.0)) for key in keys]
        table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)
        size, mean, squares = table.T
        std = (squares / (size - 1).clamp(min=1)).sqrt()
        return Moments(mean.to(like), std.to(like), size.to(like))

    def state_dict(self) -> dict[str, list[float]]:
        return {key: list(moments) for key, moments in self._by_key.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self._by_key = {key: (count, mean, squares) for key, (count, mean, squares) in state.items()}


def whiten(values: Tensor) -> Tensor:
    """Scale values [M] to mean 0 and unbiased deviation 1; fewer than two are unchanged."""
    if len(values) < 2:
        return values
    return (values - values.mean()) / (values.std() + EPS)


def has_signal(rewards: Tensor) -> bool:
    """Return whether a group's rewards [G] differ."""
    return len(rewards) > 1 and bool((rewards - rewards[0]).abs().max() > EPS)
