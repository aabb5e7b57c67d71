"""Weights and moments of optimizers in the host's memory."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from offbeat.trainer.engines.param_groups import STEP, forget
from offbeat.trainer.engines.rank_passes import OnRanks


def move_moments(states: Iterable[dict[str, Any]], device: torch.device | str) -> None:
    for state in states:
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != STEP:
                state[name] = value.to(device)


class OffloadableStates(OnRanks):
    """Rank's module and optimizer, whose states leave the device and return."""

    _module: nn.Module
    _optimizer: torch.optim.Optimizer

    def reset_optimizer(self) -> None:
        forget(self._optimizer.state.values())

    def close(self) -> None:
        """Do nothing: nothing refers to the states but module and optimizer."""

    def offload_states(self) -> None:
        self._module.to("cpu")
        move_moments(self._optimizer.state.values(), "cpu")

    def load_states(self) -> None:
        self._module.to(self.device)
        move_moments(self._optimizer.state.values(), self.device)
