"""Mergeable metrics of a batch and its losses: gauges are means over tokens [m], loss terms over optimizer steps."""

from collections.abc import Mapping

import torch
from torch import Tensor

from offbeat.services.telemetry import Partial
from offbeat.trainer.algorithms.kl import k3
from offbeat.trainer.algorithms.ratio import TokenLosses, token_ratio
from offbeat.trainer.data.batch import Batch


@torch.no_grad()
def loss_gauges(terms: Mapping[str, Tensor], weights: Tensor, token_share: float) -> dict[str, Partial]:
    """Return weighted sums of terms [m], as means over optimizer steps."""
    totals = _floats([(term.detach() * weights).sum() for term in terms.values()])
    return {name: Partial("mean", total, len(weights) * token_share) for name, total in zip(terms, totals, strict=True)}


@torch.no_grad()
def policy_gauges(
    surrogate: TokenLosses,
    logprobs: Tensor,
    entropy: Tensor,
    advantages: Tensor,
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    fresh: Tensor | None,
) -> dict[str, Partial]:
    count = len(logprobs)
    if not count:
        return {}
    up, down = advantages > 0, advantages < 0
    weight = token_ratio(logprobs, behavior_logprobs)
    divergence = k3(behavior_logprobs, logprobs)
    fresh = torch.zeros_like(up) if fresh is None else fresh
    sums: dict[str, tuple[Tensor, Tensor | int]] = {
        "actor/entropy": (entropy.sum(), count),
        "actor/ratio": (surrogate.ratio.sum(), count),
        "actor/approx_kl": (k3(old_logprobs, logprobs).sum(), count),
        "actor/clipfrac_up": ((surrogate.clipped & up).sum(), up.sum()),
        "actor/clipfrac_down": ((surrogate.clipped & down).sum(), down.sum()),
        "actor/mismatch_kl": (divergence.sum(), count),
        "actor/mismatch_kl_fresh": (divergence[fresh].sum(), fresh.sum()),
        "actor/mismatch_abs": ((logprobs - behavior_logprobs).abs().sum(), count),
        "actor/is_weight": (weight.sum(), count),
        "actor/is_weight_square": (weight.square().sum(), count),
    }
    maxima = {"actor/ratio_max": surrogate.ratio.max(), "actor/is_weight_max": weight.max()}
    counts = [torch.as_tensor(n, device=logprobs.device) for _, n in sums.values()]
    numbers = _floats([*(total for total, _ in sums.values()), *counts, *maxima.values()])
    totals, sizes, highest = numbers[: len(sums)], numbers[len(sums) : 2 * len(sums)], numbers[2 * len(sums) :]
    means = {name: Partial("mean", total, n) for name, total, n in zip(sums, totals, sizes, strict=True) if n}
    return means | {name: Partial("max", number) for name, number in zip(maxima, highest, strict=True)}


@torch.no_grad()
def correction_gauges(
    weight: Tensor | None, cut: Tensor | None, kept: Tensor | None, advantages: Tensor
) -> dict[str, Partial]:
    sums: dict[str, tuple[Tensor, Tensor | int]] = {}
    if weight is not None and cut is not None:
        sums["actor/correction_weight"] = (weight.sum(), len(weight))
        sums["actor/correction_clipfrac"] = (cut.sum(), len(weight))
    if kept is not None:
        up, down = advantages > 0, advantages < 0
        sums["actor/maskfrac"] = ((~kept).sum(), len(kept))
        sums["actor/maskfrac_up"] = ((~kept & up).sum(), up.sum())
        sums["actor/maskfrac_down"] = ((~kept & down).sum(), down.sum())
    if not sums:
        return {}
    device = advantages.device
    flat = [torch.as_tensor(value, device=device) for pair in sums.values() for value in pair]
    numbers = iter(_floats(flat))
    pairs = {name: (next(numbers), next(numbers)) for name in sums}
    return {name: Partial("mean", total, count) for name, (total, count) in pairs.items() if count}


def with_effective_sample_size(merged: Mapping[str, Partial]) -> dict[str, Partial]:
    """Add `actor/ess`, (sum w)^2 / (n sum w^2) of the importance weights; 1 is on-policy.

    merged: one step's gauges of all micro-batches and ranks.
    """
    mean, square = merged.get("actor/is_weight"), merged.get("actor/is_weight_square")
    if mean is None or square is None or not square.value:
        return dict(merged)
    return {**merged, "actor/ess": Partial("last", mean.value**2 / square.value)}


@torch.no_grad()
def batch_gauges(
    batch: Batch,
    trained: Tensor,
    advantages: Tensor,
    returns: Tensor | None,
    values: Tensor | None,
    version: int | None,
    critic_weights: Tensor | None = None,
) -> dict[str, Partial]:
    """Return a batch's gauges, identical on every rank; staleness is in versions.

    trained: episodes in the loss, [T] bool; critic_weights: [M], 0 where the critic is not trained, None: nowhere.
    """
    if not batch.num_sampled:
        return {}
    lengths = torch.bincount(batch.trajectory, minlength=len(batch.episode_reward)).float()
    out = {
        **_spread("shaped_reward", batch.episode_reward[trained]),
        **_spread("advantage", advantages[trained[batch.trajectory]]),
        **_spread("tokens/response_length", lengths),
        "tokens_trained": Partial("sum", float(batch.num_sampled)),
        "tokens/computed": Partial("sum", float(batch.num_tokens)),
    }
    if returns is not None and values is not None:
        if critic_weights is not None:
            returns, values = returns[critic_weights > 0], values[critic_weights > 0]
        out |= _spread("critic/returns", returns) | _spread("critic/values", values)
        variance = float(returns.var(correction=0))
        if variance > 0:
            unexplained = float((returns - values).var(correction=0)) / variance
            out["critic/explained_variance"] = Partial("last", 1.0 - unexplained)
    if version is not None:
        out |= _spread("actor/token_staleness", (version - batch.versions).float())
        oldest, newest = _version_ranges(batch)
        out |= _spread("actor/trajectory_age", (version - oldest).float())
        out |= _spread("actor/version_span", (newest - oldest).float())
    return out


def _version_ranges(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return oldest and newest version of trajectories with sampled tokens, [t] int64."""
    _, place = torch.unique(batch.trajectory, return_inverse=True)
    start = batch.versions.new_zeros(int(place.max()) + 1)
    oldest = start.scatter_reduce(0, place, batch.versions, "amin", include_self=False)
    return oldest, start.scatter_reduce(0, place, batch.versions, "amax", include_self=False)


def _spread(name: str, values: Tensor) -> dict[str, Partial]:
    if not len(values):
        return {}
    total, low, high = _floats([values.sum(), values.min(), values.max()])
    return {
        f"{name}/mean": Partial("mean", total, float(len(values))),
        f"{name}/min": Partial("min", low),
        f"{name}/max": Partial("max", high),
    }


def _floats(scalars: list[Tensor]) -> list[float]:
    """Read scalars with one device transfer."""
    return torch.stack([scalar.to(torch.float64) for scalar in scalars]).tolist() if scalars else []


@torch.no_grad()
def pair_metrics(
    losses: Tensor, chosen: Tensor, rejected: Tensor, others: Mapping[str, Tensor] | None = None
) -> dict[str, Partial]:
    """Return TRL's metrics of P pairs, from losses, rewards and other values, [P] each."""
    values = {
        "loss": losses,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).to(losses),
        **(others or {}),
    }
    sums = torch.stack([value.sum().double() for value in values.values()]).tolist()
    return {name: Partial("mean", total, float(len(losses))) for name, total in zip(values, sums, strict=True)}
