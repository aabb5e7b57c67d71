"""What the policy's ranks and a critic with processes of its own exchange in a step.

Invariant: all ranks of the world make the same calls in the same order: values, targets, gauges.
"""

import torch
from safetensors.torch import load, save
from torch import Tensor

from offbeat.services.telemetry import MetricRecord, decode_record, encode_record
from offbeat.trainer.engines.process_group import Ranks, broadcast
from offbeat.trainer.losses.targets import Targets, ValueTargets
from offbeat.trainer.training.critic_steps import CriticValues, Gauges

VALUES, NEXT_VALUES = "values", "next_values"
RETURNS, WEIGHTS, SHARE = "returns", "weights", "share"


class RemoteCritic:
    """Critic as the policy's ranks see it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def values(self) -> CriticValues:
        received = load(broadcast(self._ranks, root=self._ranks.critics[0]))
        return CriticValues(received[VALUES], received.get(NEXT_VALUES))

    def send(self, targets: Targets) -> None:
        """Raises `ValueError` without returns."""
        if targets.returns is None or targets.critic_weights is None:
            raise ValueError("the critic's loss needs returns: adv_estimator gae")
        share = torch.tensor(targets.token_share, dtype=torch.float64)
        tensors = {RETURNS: targets.returns, WEIGHTS: targets.critic_weights, SHARE: share}
        broadcast(self._ranks, save({name: tensor.contiguous() for name, tensor in tensors.items()}))

    def gauges(self) -> Gauges:
        """Wait for the end of the critic's step and return its gauges."""
        return decode_record(broadcast(self._ranks, root=self._ranks.critics[0])).values


class CriticPeer:
    """Policy's ranks as the critic sees them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def exchange(self, values: CriticValues) -> ValueTargets:
        """Send the values and return the targets computed with them."""
        tensors: dict[str, Tensor] = {VALUES: values.values}
        if values.next_values is not None:
            tensors[NEXT_VALUES] = values.next_values
        self._send(save(tensors))
        received = load(broadcast(self._ranks))
        return ValueTargets(received[RETURNS], values.values, received[WEIGHTS], float(received[SHARE]))

    def send_gauges(self, gauges: Gauges) -> None:
        self._send(encode_record(MetricRecord("critic", gauges)))

    def _send(self, message: bytes) -> None:
        broadcast(self._ranks, message, root=self._ranks.critics[0])
