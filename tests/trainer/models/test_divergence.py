"""KL over the whole vocabulary: the sum and its gradient, by chunks."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.data.batch import microbatches, pack
from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models import logprobs
from offbeat.trainer.models.divergence import ReferenceStates, full_kl
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.packing import PackedInput
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.fakes import make_group

ROWS, VOCABULARY, WIDTH = 7, 11, 5


def by_hand(logits: Tensor, states: ReferenceStates, heats: Tensor) -> Tensor:
    rows: list[Tensor] = []
    for row, hidden, heat in zip(logits, states.hidden, heats, strict=True):
        p = (row / heat).softmax(0)
        q = (states.head @ hidden / heat).softmax(0)
        rows.append(sum((p[v] * (p[v] / q[v]).log() for v in range(len(p))), start=torch.zeros((), dtype=row.dtype)))
    return torch.stack(rows)


@pytest.mark.parametrize("chunk", [VOCABULARY, 3 * VOCABULARY, 1 << 24])
@pytest.mark.parametrize("one_heat", [True, False])
def test_full_kl_and_gradient_equal_the_vocabulary_sum(
    chunk: int, one_heat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CPU_CHUNK_ELEMENTS", chunk)
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, VOCABULARY, generator=draw, dtype=torch.float64).requires_grad_()
    states = ReferenceStates(*(torch.randn(n, WIDTH, generator=draw, dtype=torch.float64) for n in (ROWS, VOCABULARY)))
    heats = (
        torch.full((ROWS,), 0.7, dtype=torch.float64) if one_heat else torch.linspace(0.5, 2, ROWS, dtype=torch.float64)
    )
    weights = torch.randn(ROWS, generator=draw, dtype=torch.float64)
    got, expected = full_kl(logits, states, 0.7 if one_heat else heats), by_hand(logits, states, heats)
    torch.testing.assert_close(got, expected)
    assert float(got.detach().min()) >= 0
    (slope,) = torch.autograd.grad((got * weights).sum(), logits)
    (expected_slope,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(slope, expected_slope)


def test_no_tokens_have_no_divergence() -> None:
    assert full_kl(torch.zeros(0, 4), ReferenceStates(torch.zeros(0, 2), torch.zeros(4, 2))).shape == (0,)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    kl = full_kl(logits, ReferenceStates(torch.tensor([[1.0]]), torch.tensor([[0.0], [50.0], [0.0]])))
    assert float(kl.detach()) == pytest.approx(50.0)
    kl.sum().backward()
    assert torch.isfinite(logits.grad).all()  # pyright: ignore[reportArgumentType]


def test_full_kl_is_zero_to_itself_and_the_mean_of_k1_to_others(tmp_path: Path) -> None:
    write_tiny_policy(tmp_path, TinyPolicyConfig(num_hidden_layers=1), ["a", "b", "c", "d"])
    one, other = (load_policy(tmp_path, ModelArgs(), seed=seed) for seed in (1, 2))
    batch = pack([make_group(0, rewards=(0.0, 1.0))])
    (micro,) = microbatches(batch, range(batch.num_sequences), 10_000)
    x = PackedInput.of(micro.tokens, micro.cu_seqlens, micro.positions)

    def divergences(reference: FrozenModel) -> Tensor:
        (states,) = reference.hidden_states([x])
        divergences = one(PackedInput(x.tokens, x.packing, x.positions, reference=states)).divergences
        assert divergences is not None
        return divergences

    alone = Ranks(0, 0, 1, torch.device("cpu"))
    twin = FrozenModel(load_policy(tmp_path, ModelArgs(), seed=1), alone)
    assert float(divergences(twin).detach().abs().max()) < 1e-6
    logits = [m.model(x.tokens[None], logits_to_keep=x.positions - 1, use_cache=False, packing=x.packing).logits[0]
              for m in (one, other)]  # fmt: skip
    p, q = (values.log_softmax(1) for values in logits)
    torch.testing.assert_close(divergences(FrozenModel(other, alone)), (p.exp() * (p - q)).sum(1), rtol=1e-4, atol=1e-6)


def test_reference_runs_once_per_micro_batch(tmp_path: Path) -> None:
    write_tiny_policy(tmp_path, TinyPolicyConfig(num_hidden_layers=1), ["a", "b", "c", "d"])
    policy = load_policy(tmp_path, ModelArgs(), seed=1)
    batch = pack([make_group(0, rewards=(0.0, 1.0))])
    (micro,) = microbatches(batch, range(batch.num_sequences), 10_000)
    passes: list[int] = []
    policy.model.base_model.register_forward_hook(lambda *_: passes.append(1))
    x = PackedInput.of(micro.tokens, micro.cu_seqlens, micro.positions)
    (states,) = FrozenModel(policy, Ranks(0, 0, 1, torch.device("cpu"))).hidden_states([x])
    assert len(passes) == 1
    torch.testing.assert_close(states.hidden @ states.head.T, policy.logits(x), rtol=0, atol=1e-5)
