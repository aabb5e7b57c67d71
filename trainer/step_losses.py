"""What each pass of an optimizer step is trained on, and the gauges that the passes leave."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.telemetry import Partial
from trainer.batch import MicroBatch
from trainer.config import LearnerConfig
from trainer.models.policy import Sampled
from trainer.objective import critic_loss, policy_loss
from trainer.targets import Targets


@dataclass(frozen=True, slots=True)
class StepLosses:
    """Loss functions of one optimizer step, for `TrainEngine.train`."""

    config: LearnerConfig
    micro: Sequence[MicroBatch]
    targets: Targets
    entropy_coef: float
    device: torch.device
    gauges: list[dict[str, Partial]] = field(default_factory=list[dict[str, Partial]])
    """Of the passes so far."""

    def of_policy(self, i: int, said: Sampled) -> Tensor:
        """The policy's, and its value head's where it has one."""
        here = self.targets.at(self.micro[i].index, self.device)
        loss, seen = policy_loss(self.config, said.logprobs, said.entropies, here, self.entropy_coef, said.divergences)
        worst = (said.logprobs.detach() - here.behavior_logprobs).abs().max()
        self.gauges.append({**seen, "actor/mismatch_abs_max": Partial("max", float(worst))})
        return loss + self.of_head(i, said) if self.config.has_value_head else loss

    def of_head(self, i: int, said: Sampled) -> Tensor:
        """The value head's share of the policy's loss."""
        return self.config.critic.vf_coef * self.of_critic(i, values_of(said))

    def of_critic(self, i: int, values: Tensor) -> Tensor:
        """The value loss."""
        loss, seen = critic_loss(self.config, values, self.targets.at(self.micro[i].index, self.device))
        self.gauges.append(dict(seen))
        return loss


def values_of(said: Sampled) -> Tensor:
    """Raises ValueError if it was a policy without a value head that said it."""
    if said.values is None:
        raise ValueError("critic.backbone policy needs a policy with a value head")
    return said.values


def all_of(said: Sampled) -> Tensor:
    """[1 to 3, M], of one forward pass: logprobs, divergences where there is an anchor, values where there is a head."""
    return torch.stack([each for each in (said.logprobs, said.divergences, said.values) if each is not None])
