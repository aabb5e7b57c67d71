"""Loss of `pipeline: reward_model`: means over the optimizer step's pairs.

Invariant: both members of a pair are in one micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.services.telemetry import Partial
from offbeat.trainer.algorithms.bradley_terry import bradley_terry
from offbeat.trainer.data.batch import Batch, MicroBatch
from offbeat.trainer.losses.metrics import pair_metrics


@dataclass(slots=True)
class RewardModelLosses:
    """Loss function for `TrainEngine.train`.

    margins: [T], of each trajectory's pair. num_pairs: of the step on all ranks.
    """

    batch: Batch
    micro: Sequence[MicroBatch]
    margins: Tensor
    center_coef: float
    num_pairs: int
    gauges: list[dict[str, Partial]] = field(default_factory=list[dict[str, Partial]])

    def of_policy(self, i: int, output: Tensor) -> Tensor:
        """output: [m], a reward for each trajectory, even numbers are chosen responses."""
        members, order = self.batch.trajectory[self.micro[i].index].sort()
        if not torch.equal(members[::2] + 1, members[1::2]) or bool((members[::2] % 2).any()):
            raise ValueError("a pair's members are in different micro-batches")
        rewards = output[order.to(output.device)]
        chosen, rejected = rewards[::2], rewards[1::2]
        losses = bradley_terry(chosen, rejected, self.margins[members[::2]].to(rewards), self.center_coef)
        self.gauges.append(pair_metrics(losses, chosen, rejected))
        return losses.sum() / self.num_pairs
