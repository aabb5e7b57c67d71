"""Loss of supervised fine-tuning, of `pipeline: sft` and the warm start.

Losses of micro-batches and ranks sum to the mean over the optimizer step's learned tokens.
"""

from dataclasses import dataclass, field

from torch import Tensor

from offbeat.services.telemetry import Partial
from offbeat.trainer.algorithms.sft import negative_log_likelihood
from offbeat.trainer.models.policy import Sampled


@dataclass(slots=True)
class SupervisedLosses:
    """Loss function for `TrainEngine.train`. count: learned tokens of the step on all ranks."""

    count: int
    gauges: list[dict[str, Partial]] = field(default_factory=list[dict[str, Partial]])

    def of_policy(self, _: int, output: Sampled) -> Tensor:
        loss = negative_log_likelihood(output.logprobs, self.count)
        value, size = float(loss.detach()), float(len(output.logprobs))
        self.gauges.append(
            {
                "loss": Partial("mean", value * self.count, size),
                "actor/entropy": Partial("mean", float(output.entropies.detach().sum()), size),
            }
        )
        return loss
