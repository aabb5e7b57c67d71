"""Calls of the user's functions, which check shapes, as another shape could broadcast."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from offbeat.envs.class_path import load_object
from offbeat.services.errors import MeshError
from offbeat.trainer.algorithms.ratio import TokenLosses
from offbeat.trainer.data.batch import Batch


class UserFunctionError(MeshError):
    """Result of a user's function that breaks its contract."""


@lru_cache(maxsize=32)
def load_function(path: str) -> Callable[..., Any]:
    """Import a function.

    Raises:
        UserFunctionError: not importable, or not callable.
    """
    try:
        found = load_object(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserFunctionError(f"can't import {path}: {error}") from error
    except Exception as error:  # a user's module may raise anything
        raise UserFunctionError(f"can't import {path}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise UserFunctionError(f"{path} is a {type(found).__name__}, not a function")
    return cast(Callable[..., Any], found)


def estimate_advantages(path: str, rewards: Tensor, batch: Batch) -> Tensor:
    """Return the advantages of `adv_estimator`, [M] float; raises `UserFunctionError`. rewards: [M]."""
    result = check_tensor(path, load_function(path)(rewards, batch), rewards.shape)
    return result.detach().to(rewards)


def compute_loss(path: str, terms: Any, ratio: Tensor) -> TokenLosses:
    """Return the losses of `pg_variant`, [m]; raises `UserFunctionError`."""
    loss = check_tensor(path, load_function(path)(terms), ratio.shape)
    return TokenLosses(loss, ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))


def correct_tokens(
    path: str, logprobs: Tensor, behavior_logprobs: Tensor, turn: Tensor, sequence: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return weights and kept tokens of `train_infer_correction.function`, [m] each, or None; raises
    `UserFunctionError`."""
    result = load_function(path)(logprobs, behavior_logprobs, turn, sequence)
    if not isinstance(result, tuple) or len(cast(tuple[Any, ...], result)) != 2:
        raise UserFunctionError(f"{path} returned {_describe(result)}, not a pair of weights and kept tokens")
    weight, kept = cast(tuple[Any, Any], result)
    if weight is not None:
        weight = check_tensor(path, weight, logprobs.shape).detach()
    if kept is not None:
        kept = check_tensor(path, kept, logprobs.shape, is_mask=True)
    return weight, kept


def check_tensor(path: str, result: object, shape: tuple[int, ...], *, is_mask: bool = False) -> Tensor:
    """Return a float (mask: bool) tensor of the shape; raises `UserFunctionError` for another."""
    if not isinstance(result, Tensor):
        raise UserFunctionError(f"{path} returned {_describe(result)}, not a tensor")
    if result.shape != shape:
        raise UserFunctionError(f"{path} returned shape {list(result.shape)}, not {list(shape)}")
    if is_mask and result.dtype != torch.bool:
        raise UserFunctionError(f"{path} returned {result.dtype} for a mask, not torch.bool")
    if not is_mask and not result.dtype.is_floating_point:
        raise UserFunctionError(f"{path} returned {result.dtype}, not a float tensor")
    return result


def _describe(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
