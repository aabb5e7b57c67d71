"""Loss of `pipeline: distill`.

Losses of micro-batches and ranks sum to the weighted means over the optimizer step's taught and learned tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from offbeat.services.telemetry import Partial
from offbeat.trainer.algorithms.divergences import DivergenceTerms
from offbeat.trainer.config.distillation import DistillConfig
from offbeat.trainer.data.batch import MicroBatch
from offbeat.trainer.models.distillation import Distillation, TeacherTokens
from offbeat.trainer.models.policy import Sampled


def make_distillation(config: DistillConfig, teachers: Sequence[TeacherTokens]) -> Distillation:
    terms = DivergenceTerms(config.js_beta, config.adaptive_kl_alpha, config.skew_lambda)
    return Distillation(config.kd_objective, terms, config.kd_temperature, config.add_tail, tuple(teachers))


@dataclass(slots=True)
class DistillationLosses:
    """Loss function for `TrainEngine.train`.

    learned: [M] bool, tokens with a likelihood term; taught: [M] bool, by any teacher; num_learned, num_taught: of the
    step on all ranks.
    """

    weight: float
    micro: Sequence[MicroBatch]
    learned: Tensor
    taught: Tensor
    num_learned: int
    num_taught: int
    gauges: list[dict[str, Partial]] = field(default_factory=list[dict[str, Partial]])

    def of_policy(self, i: int, output: Sampled) -> Tensor:
        if output.divergences is None:
            raise ValueError("the policy's input has no teacher")
        index = self.micro[i].index
        learned = self.learned[index].to(output.logprobs.device)
        nll, divergence = -output.logprobs[learned].sum(), output.divergences.sum()
        kd_share = self.weight / max(self.num_taught, 1)
        sft_share = (1 - self.weight) / max(self.num_learned, 1)
        taught = self.taught[index].to(learned)
        size, num_taught = float(learned.sum()), float(taught.sum())
        entropies = output.entropies.detach()[learned | taught]
        loss = kd_share * divergence + sft_share * nll
        self.gauges.append(
            {
                "kd_loss": Partial("mean", float(divergence.detach()), num_taught),
                "sft_loss": Partial("mean", float(nll.detach()), size),
                "actor/entropy": Partial("mean", float(entropies.sum()), float(len(entropies))),
            }
        )
        return loss


def add_loss(weight: float, gauges: dict[str, Partial]) -> dict[str, Partial]:
    """Return merged gauges with the loss."""
    loss = weight * gauges["kd_loss"].value + (1 - weight) * gauges["sft_loss"].value
    return {**gauges, "loss": Partial("mean", loss, 1.0)}
