"""Optimizer parameter groups: the model's, then its value head's."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from offbeat.trainer.config.learner import TrainingArgs
from offbeat.trainer.engines.base import Hyperparameters
from offbeat.trainer.models.value_head import HEAD


def parameter_groups(module: nn.Module) -> list[dict[str, Any]]:
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    head = [parameter for name, parameter in trained if name.startswith(HEAD)]
    rest = [parameter for name, parameter in trained if not name.startswith(HEAD)]
    return [{"params": rest}, {"params": head}] if head else [{"params": rest}]


def adam_settings(training: TrainingArgs) -> dict[str, Any]:
    """Return AdamW's constant settings, which loading a state overwrites."""
    return {"betas": (training.adam_beta1, training.adam_beta2), "eps": training.adam_epsilon}


def adopt(groups: Sequence[dict[str, Any]], hyperparameters: Hyperparameters) -> None:
    """Set learning rates and weight decay."""
    model_rate, head_rate = hyperparameters.learning_rate, hyperparameters.head_learning_rate
    rates = [0.0 if hyperparameters.head_alone else model_rate, model_rate if head_rate is None else head_rate]
    for group, rate in zip(groups, rates, strict=False):
        group["lr"], group["weight_decay"] = rate, hyperparameters.weight_decay


def forget(states: Iterable[Mapping[str, Any]]) -> None:
    """Zero Adam's moments and step counts."""
    for state in states:
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()
