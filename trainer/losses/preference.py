"""Loss of `pipeline: dpo`: means over the optimizer step's pairs.

Invariant: a micro-batch has both members of a pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.services.telemetry import Partial
from offbeat.trainer.algorithms.preference import PREFERENCE_LOSSES, PairLogprobs, PreferenceTerms
from offbeat.trainer.config.preference import PreferenceConfig
from offbeat.trainer.data.batch import Batch, MicroBatch
from offbeat.trainer.losses.metrics import pair_metrics
from offbeat.trainer.models.policy import Sampled


@dataclass(slots=True)
class PreferenceLosses:
    """Loss function for `TrainEngine.train`.

    num_pairs, num_chosen_tokens: of the step on all ranks. ref_logprobs: the reference's, [M], or None.
    """

    config: PreferenceConfig
    batch: Batch
    micro: Sequence[MicroBatch]
    num_pairs: int
    num_chosen_tokens: int
    ref_logprobs: Tensor | None
    gauges: list[dict[str, Partial]] = field(default_factory=list[dict[str, Partial]])

    def of_policy(self, i: int, output: Sampled) -> Tensor:
        trajectory = self.batch.trajectory[self.micro[i].index]
        reference = None if self.ref_logprobs is None else self.ref_logprobs[self.micro[i].index]
        loss, gauges = self.of_logprobs(output.logprobs, reference, trajectory)
        self.gauges.append(gauges)
        return loss

    def of_logprobs(
        self, logprobs: Tensor, ref_logprobs: Tensor | None, trajectory: Tensor
    ) -> tuple[Tensor, dict[str, Partial]]:
        """Return summand and gauges of complete pairs.

        logprobs, ref_logprobs: [m]; trajectory: [m] int64, even numbers are chosen responses.
        """
        members, place = torch.unique(trajectory, return_inverse=True)
        is_chosen = members % 2 == 0
        if not torch.equal(members[is_chosen] + 1, members[~is_chosen]):
            raise ValueError("a pair's members are in different micro-batches")
        place = place.to(logprobs.device)
        counts = torch.bincount(place, minlength=len(members)).to(logprobs)
        policy = self._total(logprobs, place, counts)
        reference = torch.zeros_like(policy)
        if ref_logprobs is not None:
            reference = self._total(ref_logprobs.to(logprobs), place, counts)
        is_chosen = is_chosen.to(logprobs.device)
        pairs = PairLogprobs(policy[is_chosen], policy[~is_chosen], reference[is_chosen], reference[~is_chosen])
        terms = PreferenceTerms(self.config.beta, self.config.label_smoothing, self.config.simpo_gamma)
        losses = PREFERENCE_LOSSES[self.config.loss_type](pairs, terms)
        loss = losses.sum() / self.num_pairs
        gauges = _gauges(pairs, losses, self.config.beta)
        if self.config.sft_coef:
            chosen_nll = -logprobs[is_chosen[place]].sum()
            loss = loss + self.config.sft_coef * chosen_nll / self.num_chosen_tokens
            size = float(counts[is_chosen].sum())
            gauges["sft_loss"] = Partial("mean", float(chosen_nll.detach()), size)
            gauges["loss"] = Partial("mean", float(loss.detach()) * self.num_pairs, float(len(losses)))
        return loss, gauges

    def _total(self, logprobs: Tensor, place: Tensor, counts: Tensor) -> Tensor:
        totals = logprobs.new_zeros(len(counts)).index_add(0, place, logprobs)
        return totals / counts if self.config.takes_means else totals


@torch.no_grad()
def _gauges(pairs: PairLogprobs, losses: Tensor, beta: float) -> dict[str, Partial]:
    """Return TRL's metrics; `rewards/accuracies`: share of pairs with a greater chosen reward."""
    chosen, rejected = beta * (pairs.chosen - pairs.ref_chosen), beta * (pairs.rejected - pairs.ref_rejected)
    logprobs = {"logps/chosen": pairs.chosen, "logps/rejected": pairs.rejected}
    return pair_metrics(losses, chosen, rejected, logprobs)
