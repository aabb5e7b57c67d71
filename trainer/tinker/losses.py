"""Losses of `forward_backward`, sums over tokens (https://tinker-docs.thinkingmachines.ai/tinker/losses)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offbeat.services.errors import CodecError
from offbeat.services.tinker.wire import Datum
from offbeat.trainer.algorithms.cispo import clipped_weight_policy_gradient
from offbeat.trainer.algorithms.ppo import clipped_surrogate
from offbeat.trainer.algorithms.ratio import bounded_exp, token_ratio
from offbeat.trainer.algorithms.units import sum_over

Settings = Mapping[str, float]
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
"""Defaults of the ratio's bounds."""
TARGETS, WEIGHTS, ADVANTAGES, RATIO_MASK = "target_tokens", "weights", "advantages", "sequence_ratio_mask"
OPTIONAL = {WEIGHTS, RATIO_MASK}
"""Inputs with a default: 1, and whether a token has an advantage."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Tokens of a micro-batch, all [M]. sequence: index of a token's datum; given: inputs by name."""

    logprobs: Tensor
    given: Mapping[str, Tensor]
    sequence: Tensor

    @property
    def ratio(self) -> Tensor:
        return token_ratio(self.logprobs, self.given["logprobs"])


def _cross_entropy(terms: Terms, _: Settings) -> Tensor:
    return -terms.logprobs * terms.given[WEIGHTS]


def _importance_sampling(terms: Terms, _: Settings) -> Tensor:
    return -terms.ratio * terms.given[ADVANTAGES]


def _ppo(terms: Terms, settings: Settings) -> Tensor:
    return _clipped(terms.ratio, terms.given[ADVANTAGES], settings)


def _gspo(terms: Terms, settings: Settings) -> Tensor:
    """Clip the ratio of the marked tokens of a sequence, with each token's gradient (arXiv:2507.18071, eq. 14)."""
    log_ratio, marked = terms.logprobs - terms.given["logprobs"], terms.given[RATIO_MASK] != 0
    number = sum_over(marked.to(log_ratio), terms.sequence).clamp(min=1)
    mean = sum_over(torch.where(marked, log_ratio.detach(), 0.0), terms.sequence) / number
    ratio = bounded_exp(mean) * (log_ratio - log_ratio.detach()).exp()
    return _clipped(ratio, terms.given[ADVANTAGES], settings)


def _cispo(terms: Terms, settings: Settings) -> Tensor:
    low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
    return clipped_weight_policy_gradient(
        terms.ratio, terms.logprobs, terms.given[ADVANTAGES], epsilon_low=1 - low, epsilon_high=high - 1
    ).loss


def _dro(terms: Terms, settings: Settings) -> Tensor:
    """Direct reward optimization (arXiv:2405.19107)."""
    distance = (terms.logprobs - terms.given["logprobs"]).square()
    return 0.5 * settings["beta"] * distance - terms.logprobs * terms.given[ADVANTAGES]


def _clipped(ratio: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
    return clipped_surrogate(ratio, advantages, clip_low=1 - low, clip_high=high - 1).loss


@dataclass(frozen=True, slots=True)
class Loss:
    """compute: token losses [M]; inputs: names beside `target_tokens`; defaults: of `loss_fn_config`."""

    compute: Callable[[Terms, Settings], Tensor]
    inputs: tuple[str, ...] = ("logprobs", ADVANTAGES)
    defaults: Mapping[str, float] | None = None


LOSSES = {
    "cross_entropy": Loss(_cross_entropy, (WEIGHTS,)),
    "importance_sampling": Loss(_importance_sampling),
    "ppo": Loss(_ppo, defaults=CLIP),
    "cispo": Loss(_cispo, defaults=CLIP),
    "gspo": Loss(_gspo, ("logprobs", ADVANTAGES, RATIO_MASK), CLIP),
    "dro": Loss(_dro, defaults={"beta": 0.05}),
}
REFUSED = {
    "stable_reinforce": 'it is proprietary: pass loss_fn="ppo" (in tinker-cookbook also in AsyncConfig)',
    "custom": "losses run in the client: pass a Python function to forward_backward_custom",
}


def find_loss(name: str) -> Loss:
    """Return a loss; raises CodecError with the known names."""
    if (loss := LOSSES.get(name)) is None:
        reason = REFUSED.get(name, f"there are {', '.join(LOSSES)}")
        raise CodecError(f"loss_fn {name!r} is not available: {reason}")
    return loss


def read_settings(name: str, loss: Loss, given: Mapping[str, float | str]) -> dict[str, float]:
    """Complete `loss_fn_config`; raises CodecError for an unknown key or a text."""
    settings = dict(loss.defaults or {})
    for key, value in given.items():
        if key not in settings or not isinstance(value, (int, float)):
            known = ", ".join(settings) or "none"
            raise CodecError(f"loss_fn_config.{key}: {value!r} is no setting of {name}, whose numbers are {known}")
        settings[key] = float(value)
    return settings


def check_datum(datum: Datum, loss: Loss, *, vocab_size: int, context: int, path: str) -> None:
    """Raise CodecError unless the datum fits the model and the loss."""
    length = len(datum.tokens)
    if not 0 < length <= context:
        raise CodecError(f"{path}.model_input has {length} tokens: 1 to {context} fit the model")
    names = (TARGETS, *loss.inputs)
    if set(datum.inputs) - set(names) or set(names) - set(datum.inputs) - OPTIONAL:
        raise CodecError(f"{path}.loss_fn_inputs has {sorted(datum.inputs)}: the loss needs {', '.join(names)}")
    targets = datum.inputs[TARGETS]
    for name, tokens in (("model_input", datum.tokens), (TARGETS, targets)):
        if tokens.dtype.kind != "i" or (tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size):
            raise CodecError(f"{path}.{name} holds no token ids from 0 to {vocab_size - 1}")
    allows_several = loss.inputs == (WEIGHTS,)
    if targets.shape[:1] != (length,) or targets.ndim > (2 if allows_several else 1):
        allowed = f"[{length}] or [{length}, K]" if allows_several else f"[{length}]"
        raise CodecError(f"{path}.{TARGETS} has shape {list(targets.shape)}: {allowed} fits the model_input")
    for name in set(loss.inputs) & set(datum.inputs):
        values = datum.inputs[name]
        if values.shape != targets.shape:
            raise CodecError(f"{path}.{name} has shape {list(values.shape)}, {TARGETS} {list(targets.shape)}")
        if values.dtype.kind != "f" or not np.isfinite(values).all():
            raise CodecError(f"{path}.{name} holds values that are no finite float32 numbers")
    if RATIO_MASK in datum.inputs and not datum.inputs[RATIO_MASK].any() and datum.inputs[ADVANTAGES].any():
        raise CodecError(f"{path}.{RATIO_MASK} marks no token: the ratio of a sequence with advantages needs one")
