"""KTO against a plain loop in float64, with gradients, and against TRL's trainer."""

import importlib.util
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.services.telemetry import merge_all
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.data.batch import microbatches, pack
from offbeat.trainer.models.policy import Sampled
from offbeat.trainer.training.data_objectives import UnpairedObjective
from tests.trainer.trajectories import group, trajectory

LABELS = [1.0, 0.0, 0.0, 1.0, 1.0]
GROUPS = [
    group(n, trajectory(0, [(3, 1 + n, label)], base=9 * n), trajectory(1, [(3, 2 + n % 3, 0.0)], base=9 * n))
    for n, label in enumerate(LABELS)
]
BATCH = pack(GROUPS)
SETTINGS: list[dict[str, Any]] = [{}, {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.7}]


def random_logprobs(seed: int, shift: float = 0.0) -> Tensor:
    noise = torch.rand(BATCH.num_sampled, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return -noise - 0.05 + shift


def objective(policy: Tensor, reference: Tensor, **dpo: Any) -> UnpairedObjective:
    config = LearnerConfig.model_validate({"pipeline": "dpo", "dpo": {"loss_type": "kto", **dpo}})

    def infer(sequences: Any) -> Tensor:
        """Only what is asked for."""
        asked = torch.isin(BATCH.sequence, torch.tensor(list(sequences)))
        return torch.where(asked, policy.detach(), 0.0)

    return UnpairedObjective(config, BATCH, reference, infer)


def totals(values: Tensor) -> list[float]:
    return torch.zeros(2 * len(GROUPS), dtype=torch.float64).index_add(0, BATCH.trajectory, values).tolist()


def plain_loss(policy: Tensor, reference: Tensor, kl: float, config: Any) -> float:
    loss, mine, theirs = 0.0, totals(policy), totals(reference)
    for row, label in enumerate(LABELS):
        reward = config.beta * (mine[2 * row] - theirs[2 * row] - kl)
        value = reward if label else -reward
        weight = config.desirable_weight if label else config.undesirable_weight
        loss += weight * (1 - 1 / (1 + math.exp(-value)))
    return loss / len(LABELS)


def plain_kl(policy: Tensor, reference: Tensor) -> float:
    mine, theirs = totals(policy), totals(reference)
    return max(0.0, sum(mine[i] - theirs[i] for i in range(1, 2 * len(LABELS), 2)) / len(LABELS))


@pytest.mark.parametrize("max_tokens", [1, 20, 1000])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shift", [0.3, -0.3])
def test_losses_and_gradients_equal_a_plain_loop(settings: dict[str, Any], shift: float, max_tokens: int):
    policy, reference = random_logprobs(1, shift).requires_grad_(), random_logprobs(2)
    whole = objective(policy, reference, **settings)
    micro = microbatches(BATCH, whole.trained(range(BATCH.num_sequences)), max_tokens)
    losses = whole.make_losses(micro)
    outputs = [Sampled(policy[part.index], policy[part.index]) for part in micro]
    total = torch.stack([losses.of_policy(i, output) for i, output in enumerate(outputs)]).sum()
    total.backward()
    total = total.detach()
    kl = plain_kl(policy.detach(), reference)
    assert (kl > 0) == (shift > 0)
    config = whole.config.dpo
    assert float(total) == pytest.approx(plain_loss(policy.detach(), reference, kl, config), rel=1e-10)
    gauges = whole.finish(merge_all(losses.gauges))
    assert gauges["loss"].value == pytest.approx(float(total))
    assert gauges["kl"].value == pytest.approx(kl)
    assert policy.grad is not None
    for i in range(BATCH.num_sampled):
        step = torch.zeros_like(policy.detach())
        step[i] = 1e-6
        ends = [plain_loss(policy.detach() + sign * step, reference, kl, config) for sign in (1, -1)]
        assert float(policy.grad[i]) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-9)


def test_mismatched_responses_are_not_trained():
    whole = objective(random_logprobs(1), random_logprobs(2))
    assert whole.trained(range(BATCH.num_sequences)) == [0, 2, 4, 6, 8]


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: it is part of the dev extra")
@pytest.mark.filterwarnings("ignore:TRL currently supports vLLM", "ignore:`torch.jit")
@pytest.mark.parametrize("settings", SETTINGS)
def test_losses_and_gradients_equal_trl(settings: dict[str, Any]):
    from trl.trainer.kto_trainer import KTOTrainer

    policy, reference = random_logprobs(1, 0.1).requires_grad_(), random_logprobs(2)
    whole = objective(policy, reference, **settings)
    micro = microbatches(BATCH, whole.trained(range(BATCH.num_sequences)), 1000)
    losses = whole.make_losses(micro)
    loss = losses.of_policy(0, Sampled(policy[micro[0].index], policy[micro[0].index]))
    (gradient,) = torch.autograd.grad(loss, policy)

    rows = [torch.nn.utils.rnn.pad_sequence([policy[BATCH.trajectory == t] for t in ts], batch_first=True)
            for ts in (range(0, 10, 2), range(1, 10, 2))]  # fmt: skip
    width = rows[0].shape[1] + 1
    outputs = SimpleNamespace(
        log_probs=rows[0], entropy=torch.zeros_like(rows[0]), mean_logits=torch.zeros_like(rows[0])
    )
    references = torch.tensor(totals(reference))
    alone = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x)
    dpo = whole.config.dpo
    trainer = SimpleNamespace(
        accelerator=alone,
        model=SimpleNamespace(training=True),
        loss_type="kto",
        beta=dpo.beta,
        desirable_weight=dpo.desirable_weight,
        undesirable_weight=dpo.undesirable_weight,
        calculate_KL=True,
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        _tp_size=1,
        _total_train_tokens=0,
        _metrics={"train": defaultdict(list)},
        _compute_kl_logps=lambda *_: rows[1].sum(1).detach(),
    )
    mask = torch.ones(len(LABELS), width, dtype=torch.int64)
    batch = {
        "input_ids": mask,
        "attention_mask": mask,
        "completion_mask": mask,
        "label": torch.tensor([label > 0 for label in LABELS]),
        "ref_logps": references[::2],
        "ref_KL_logps": references[1::2],
    }
    expected = KTOTrainer._compute_loss(trainer, lambda **_: outputs, batch, False)  # pyright: ignore[reportArgumentType]
    (of_trl,) = torch.autograd.grad(expected, policy)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, of_trl)
    theirs = trainer._metrics["train"]
    ours = whole.finish(merge_all(losses.gauges))
    for name in ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected"):
        assert ours[name].value == pytest.approx(theirs[name][-1]), name
