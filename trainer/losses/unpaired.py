"""Loss of rows with one response, desirable or not (`dpo.loss_type: kto`): means over the optimizer step's rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.services.telemetry import Partial
from offbeat.trainer.algorithms.kto import kto
from offbeat.trainer.config.preference import PreferenceConfig
from offbeat.trainer.data.batch import Batch, MicroBatch
from offbeat.trainer.models.policy import Sampled


@dataclass(slots=True)
class UnpairedLosses:
    """Loss function for `TrainEngine.train`.

    kl: of the policy to the reference on mismatched responses, per response; num_rows: of the step on all ranks;
    ref_logprobs: the reference's, [M]. Responses with a positive reward are desirable.
    """

    config: PreferenceConfig
    batch: Batch
    micro: Sequence[MicroBatch]
    kl: float
    num_rows: int
    ref_logprobs: Tensor
    gauges: list[dict[str, Partial]] = field(default_factory=list[dict[str, Partial]])

    def of_policy(self, i: int, output: Sampled) -> Tensor:
        index = self.micro[i].index
        rows, place = torch.unique(self.batch.trajectory[index], return_inverse=True)
        device = output.logprobs.device
        policy = output.logprobs.new_zeros(len(rows)).index_add(0, place.to(device), output.logprobs)
        reference = self.ref_logprobs[index].to(policy)
        ratios = policy - torch.zeros_like(policy).index_add(0, place.to(device), reference)
        desirable = (self.batch.episode_reward[rows] > 0).to(device)
        config = self.config
        losses = kto(ratios, desirable, self.kl, config.beta, config.desirable_weight, config.undesirable_weight)
        self.gauges.append(_gauges(losses, config.beta * ratios, policy, desirable, self.kl))
        return losses.sum() / self.num_rows


def add_margins(gauges: dict[str, Partial]) -> dict[str, Partial]:
    """Return merged gauges with TRL's margin between the mean rewards of both kinds."""
    if "rewards/chosen" not in gauges or "rewards/rejected" not in gauges:
        return gauges
    margin = gauges["rewards/chosen"].value - gauges["rewards/rejected"].value
    return {**gauges, "rewards/margins": Partial("mean", margin, 1.0)}


@torch.no_grad()
def _gauges(losses: Tensor, rewards: Tensor, logprobs: Tensor, desirable: Tensor, kl: float) -> dict[str, Partial]:
    count = float(len(losses))
    gauges = {"loss": Partial("mean", float(losses.sum()), count), "kl": Partial("mean", kl * count, count)}
    for name, rows in (("chosen", desirable), ("rejected", ~desirable)):
        if size := float(rows.sum()):
            gauges[f"rewards/{name}"] = Partial("mean", float(rewards[rows].sum()), size)
            gauges[f"logps/{name}"] = Partial("mean", float(logprobs[rows].sum()), size)
    return gauges
