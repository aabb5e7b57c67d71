"""Trial calls of the user's functions on random input."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from offbeat.services.messages.types import Group, Segment, StopReason, Trajectory, Turn, VersionSpan
from offbeat.trainer.checks.function_keys import user_functions
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.data.batch import Batch, pack
from offbeat.trainer.data.reward_shaping import call_shaping
from offbeat.trainer.data.user_functions import UserFunctionError, compute_loss, correct_tokens, estimate_advantages
from offbeat.trainer.losses.policy_loss import LossInputs

SHAPES = ((3, 1), (4, 2), (1, 3))
"""Episodes and turns of the trials' groups."""


def check_user_functions(config: AlgorithmConfig) -> Iterator[ConfigIssue]:
    """Yield functions that can't be called, or return another shape or type or non-finite values."""
    for key, path in user_functions(config).items():
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                TRIALS[key](path)
        except UserFunctionError as error:
            yield ConfigIssue(key, str(error))
        except Exception as error:  # a user's function may raise anything
            yield ConfigIssue(key, f"{path} failed on random input: {type(error).__name__}: {error}")


def refuse_broken_functions(config: AlgorithmConfig) -> None:
    """Raise `UserFunctionError` with every unusable function."""
    if issues := list(check_user_functions(config)):
        raise UserFunctionError("; ".join(str(issue) for issue in issues))


def _try_estimator(path: str) -> None:
    batch = random_batch()
    rewards = torch.where(batch.last, batch.episode_reward[batch.trajectory], 0.0)
    before = rewards.clone()
    _check_finite(path, estimate_advantages(path, rewards, batch))
    if not torch.equal(rewards, before):
        raise UserFunctionError(f"{path} changes its argument `rewards`: work on a copy")


def _try_loss(path: str) -> None:
    batch = random_batch()
    behavior = batch.behavior_logprobs
    logprobs = (behavior + 0.1 * torch.randn_like(behavior)).requires_grad_()
    old = (behavior + 0.05 * torch.randn_like(behavior)).detach()
    ratio = (logprobs - old).exp()
    loss = compute_loss(path, LossInputs(logprobs, old, behavior, ratio, torch.randn_like(behavior)), ratio).loss
    _check_finite(path, loss)
    if not loss.requires_grad:
        raise UserFunctionError(f"{path} returned a loss without gradient: derive it from logprobs or ratio")
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs, allow_unused=True)
    if gradient is None:
        raise UserFunctionError(f"{path} returned a loss whose gradient does not reach logprobs")
    _check_finite(path, gradient, "its gradient")


def _try_correction(path: str) -> None:
    batch = random_batch()
    logprobs = batch.behavior_logprobs + 0.1 * torch.randn_like(batch.behavior_logprobs)
    weight, _ = correct_tokens(path, logprobs, batch.behavior_logprobs, batch.turn, batch.sequence)
    if weight is not None:
        _check_finite(path, weight, "its weights")


def _try_shaping(path: str) -> None:
    for group in random_groups():
        for trajectory in group.trajectories:
            call_shaping(path, trajectory)


TRIALS: dict[str, Callable[[str], None]] = {
    "adv_estimator": _try_estimator,
    "pg_variant": _try_loss,
    "train_infer_correction.function": _try_correction,
    "reward_shaping.function": _try_shaping,
}
"""By key."""


def _check_finite(path: str, result: Tensor, what: str = "its result") -> None:
    if not bool(torch.isfinite(result).all()):
        bad = next(value for value in result.detach().flatten().tolist() if not math.isfinite(value))
        raise UserFunctionError(f"{path}: {what} has {bad} on random input")


def random_batch() -> Batch:
    return pack(random_groups())


def random_groups() -> list[Group]:
    """Return groups of several sizes, with a single episode and with equal rewards."""
    rng = np.random.default_rng(0)
    groups: list[Group] = []
    for number, (episodes, turns) in enumerate(SHAPES):
        members = [
            _random_trajectory(rng, f"group-{number}", index, turns, is_equal=number == 1) for index in range(episodes)
        ]
        groups.append(Group(str(number), f"group-{number}", number, "tag", number, 0, tuple(members)))
    return groups


def _random_trajectory(
    rng: np.random.Generator, group_id: str, index: int, num_turns: int, *, is_equal: bool
) -> Trajectory:
    tokens, mask, spans, turns = [1], [False], list[VersionSpan](), list[Turn]()
    for number in range(num_turns):
        start, length = len(tokens) + 1, int(rng.integers(1, 5))
        tokens += rng.integers(2, 50, size=length + 1).tolist()
        mask += [False, *(True,) * length]
        spans.append(VersionSpan(start, start + length, 0))
        turns.append(Turn(0, start, start + length, 1.0 if is_equal else float(rng.normal()), f"state-{number}"))
    sampled = np.array(mask)
    logprobs = np.where(sampled, -rng.uniform(0.1, 2.0, len(tokens)), 0.0).astype(np.float32)
    segment = Segment(np.array(tokens, dtype=np.int32), sampled, logprobs, tuple(spans))
    return Trajectory(
        group_id, index, 0, "tag", 0, (segment,), tuple(turns), StopReason.TERMINATED, {"success": float(index % 2)}
    )
