"""Optimizer parameter groups: the model's, then its value head's; with weight decay, those without decay apart."""

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from offbeat.trainer.config.actor_train import TrainingArgs
from offbeat.trainer.engines.base import Hyperparameters
from offbeat.trainer.engines.group_layout import splits_decay
from offbeat.trainer.models.value_head import HEAD

STEP = "step"
"""Count that AdamW keeps in the host's memory."""
CODES = ("qmap1", "qmap2")
"""Tables of the values that 8 bits stand for, in bitsandbytes' state."""


class GroupKind(NamedTuple):
    is_head: bool
    decays: bool


def parameter_groups(
    module: nn.Module, training: TrainingArgs, embedding_types: tuple[type[nn.Module], ...] = (nn.Embedding,)
) -> dict[GroupKind, list[nn.Parameter]]:
    """Group the trained parameters; norms, biases and embeddings decay only if asked."""
    embeddings = {id(p) for child in module.modules() if isinstance(child, embedding_types) for p in child.parameters()}
    groups: dict[GroupKind, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) > 1 and id(parameter) not in embeddings
            kind = GroupKind(name.startswith(HEAD), is_matrix or not splits_decay(training))
            groups.setdefault(kind, []).append(parameter)
    return {kind: groups[kind] for kind in sorted(groups, key=lambda kind: (kind.is_head, not kind.decays))}


def adam_settings(training: TrainingArgs) -> dict[str, Any]:
    """Return AdamW's constants, which loading a state overwrites."""
    return {"betas": (training.adam_beta1, training.adam_beta2), "eps": training.adam_epsilon}


def adopt(groups: Sequence[dict[str, Any]], kinds: Sequence[GroupKind], hyperparameters: Hyperparameters) -> None:
    """Set learning rates and weight decay."""
    model_rate, head_rate = hyperparameters.learning_rate, hyperparameters.head_learning_rate
    of_head = model_rate if head_rate is None else head_rate
    of_model = 0.0 if hyperparameters.head_alone else model_rate
    for group, kind in zip(groups, kinds, strict=True):
        group["lr"] = of_head if kind.is_head else of_model
        group["weight_decay"] = hyperparameters.weight_decay if kind.decays else 0.0


def forget(states: Iterable[MutableMapping[str, Any]]) -> None:
    """Zero Adam's moments and step counts; moments of 8 bits are zero by their scales."""
    for state in states:
        for name, value in state.items():
            if isinstance(value, Tensor) and name not in CODES:
                value.zero_()
            elif name == STEP:
                state[name] = 0
