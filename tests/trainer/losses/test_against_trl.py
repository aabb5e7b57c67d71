"""The same tensors through TRL's own loss methods and ours: losses and gradients agree.

TRL's `_compute_loss` is called as it stands; what it asks of a trainer (a model's logprobs, settings, a process group of
one) is given to it.
"""

import importlib.util
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.trainer.algorithms.preference import PREFERENCE_LOSSES, PairLogprobs, PreferenceTerms
from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.data.batch import Batch, pack
from offbeat.trainer.losses.policy_loss import policy_loss
from offbeat.trainer.losses.targets import build_targets
from tests.trainer.trajectories import group, trajectory

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed: it is part of the dev extra", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:TRL currently supports vLLM", "ignore:`torch.jit")

LENGTHS, REWARDS, SIZE, LONGEST = [3, 1, 4, 2, 2, 5, 1, 3], [1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.0, 0.25], 4, 8


def one_turn_batch() -> Batch:
    """Two groups of four episodes of one turn: TRL's prompts and completions."""
    members = [
        trajectory(i % SIZE, [(2, n, r)], base=20 * i) for i, (n, r) in enumerate(zip(LENGTHS, REWARDS, strict=True))
    ]
    return pack([group(0, *members[:SIZE]), group(1, *members[SIZE:])])


def padded(batch: Batch, values: Tensor) -> Tensor:
    """[T, longest] from [M]."""
    rows = [values[batch.trajectory == t] for t in range(len(LENGTHS))]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def trl_trainer(logprobs: Tensor, **settings: Any) -> SimpleNamespace:
    given: dict[str, Any] = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "delta": None,
        **settings,
    }
    args = SimpleNamespace(
        delta=given["delta"],
        use_bias_correction_kl=False,
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        steps_per_generation=1,
    )
    alone = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, **_: x
    )
    return SimpleNamespace(
        **{key: value for key, value in given.items() if key != "delta"},
        args=args,
        accelerator=alone,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        _entropy_bonus_enabled=False,
        max_completion_length=LONGEST,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    )


def inputs_of(batch: Batch, advantages: Tensor, ref: Tensor | None) -> dict[str, Any]:
    mask = padded(batch, torch.ones(batch.num_sampled)).long()
    old = padded(batch, batch.behavior_logprobs)
    return {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.int64),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "old_logps": (old * mask).sum(1),
        "ref_per_token_logps": None if ref is None else padded(batch, ref),
        "num_items_in_batch": mask.sum(),
    }


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GRPO": ({}, {"loss_agg_mode": "seq-mean-token-mean"}),
    "GRPO with KL": (
        {"beta": 0.3},
        {"loss_agg_mode": "seq-mean-token-mean", "use_kl_loss": True, "kl_loss_coef": 0.3},
    ),
    "Dr. GRPO": (
        {"loss_type": "dr_grpo"},
        {"adv_estimator": "dr_grpo", "loss_agg_mode": "seq-mean-token-sum-norm", "loss_agg_length": LONGEST},
    ),
    "DAPO": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"pg_clip_high": 0.28}),
    "GSPO": (
        {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
        {"ratio_type": "sequence", "pg_clip_low": 0.03, "pg_clip_high": 0.04, "loss_agg_mode": "seq-mean-token-mean"},
    ),
    "CISPO": (
        {"loss_type": "cispo", "epsilon_high": 1.1},  # TRL's bound is on the ratio itself
        {"pg_variant": "cispo", "cispo_epsilon_high": 0.1},
    ),
    "SAPO": ({"loss_type": "sapo"}, {"pg_variant": "sapo", "loss_agg_mode": "seq-mean-token-mean"}),
    "LUSPO's sum": ({"loss_type": "luspo"}, {"loss_agg_mode": "seq-mean-token-sum"}),
}


def shift_of(batch: Batch) -> Tensor:
    return 0.4 * torch.cos(batch.tokens[batch.positions].float())


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_trl(name: str):
    from trl.trainer.grpo_trainer import GRPOTrainer

    theirs, ours = CASES[name]
    config, batch = AlgorithmConfig(**ours), one_turn_batch()
    ref = batch.behavior_logprobs - 0.2 if config.needs_reference else None
    targets = build_targets(batch, config, ref_logprobs=ref)
    firsts = torch.searchsorted(batch.trajectory, torch.arange(len(LENGTHS)))
    logprobs = (batch.behavior_logprobs + shift_of(batch)).requires_grad_()
    loss, _ = policy_loss(config, logprobs, torch.zeros_like(logprobs), targets)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    trl = trl_trainer(padded(batch, logprobs), **theirs)
    inputs = inputs_of(batch, targets.advantages[firsts], ref)
    expected = GRPOTrainer._compute_loss(trl, trl.model, inputs)  # pyright: ignore[reportArgumentType]
    (of_trl,) = torch.autograd.grad(expected, logprobs)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, of_trl, rtol=1e-5, atol=1e-7)
    assert gradient.abs().max() > 0


def test_rloo_equals_trl():
    from trl.trainer.rloo_trainer import RLOOTrainer

    config = AlgorithmConfig(
        adv_estimator="rloo", ratio_type="sequence-product", loss_agg_mode="seq-mean-token-mean", pg_clip=0.2
    )
    batch = one_turn_batch()
    targets = build_targets(batch, config)
    rewards = torch.tensor(REWARDS).reshape(-1, SIZE)
    leave_one_out = (rewards - (rewards.sum(1, keepdim=True) - rewards) / (SIZE - 1)).flatten()
    firsts = torch.searchsorted(batch.trajectory, torch.arange(len(LENGTHS)))
    torch.testing.assert_close(targets.advantages[firsts], leave_one_out)
    logprobs = (batch.behavior_logprobs + shift_of(batch)).requires_grad_()
    loss, _ = policy_loss(config, logprobs, torch.zeros_like(logprobs), targets)
    trl = trl_trainer(padded(batch, logprobs))
    expected = RLOOTrainer._compute_loss(trl, trl.model, inputs_of(batch, leave_one_out, None))  # pyright: ignore[reportArgumentType]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    one, two = torch.autograd.grad(loss, logprobs)[0], torch.autograd.grad(expected, logprobs)[0]
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


def test_simpo_and_orpos_odds_ratio_equal_trl():
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    generator = torch.Generator().manual_seed(0)
    chosen, rejected = (-torch.rand(5, generator=generator) - 0.05 for _ in range(2))
    zero = torch.zeros(5)
    alone = SimpleNamespace(device=torch.device("cpu"))
    trl = SimpleNamespace(
        beta=2.0, simpo_gamma=0.7, alpha=0.0, loss_type="simpo", label_smoothing=0.0, accelerator=alone
    )
    terms = PreferenceTerms(beta=2.0, gamma=0.7)
    pairs = PairLogprobs(chosen.requires_grad_(), rejected.requires_grad_(), zero, zero)
    expected, *_ = CPOTrainer.cpo_loss(trl, pairs.chosen, pairs.rejected)  # pyright: ignore[reportArgumentType]
    assert_equal_losses(PREFERENCE_LOSSES["simpo"](pairs, terms), expected, pairs)
    ratios, *_ = ORPOTrainer.odds_ratio_loss(trl, pairs.chosen, pairs.rejected)  # pyright: ignore[reportArgumentType]
    assert_equal_losses(PREFERENCE_LOSSES["orpo"](pairs, terms), -pairs.chosen - ratios, pairs)


def assert_equal_losses(ours: Tensor, theirs: Tensor, pairs: PairLogprobs) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for ours_of, theirs_of in zip(
        torch.autograd.grad(ours.sum(), [pairs.chosen, pairs.rejected], retain_graph=True),
        torch.autograd.grad(theirs.sum(), [pairs.chosen, pairs.rejected], retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(ours_of, theirs_of, rtol=1e-5, atol=1e-6)
