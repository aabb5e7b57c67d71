"""Models of clients: gradients add up, states continue bit for bit, and no client changes another's."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from offbeat.services.errors import CodecError
from offbeat.services.tinker.records import Lora, OptimStep
from offbeat.services.tinker.wire import Datum
from offbeat.trainer.tinker.adapters import AdapterPool
from offbeat.trainer.tinker.client_model import Accumulated, ClientModel, Scores
from offbeat.trainer.tinker.losses import LOSSES
from tests.trainer.tinker.tiny_base import LENGTHS, LORA, make_data, make_pool

CROSS_ENTROPY = LOSSES["cross_entropy"]
STEP = OptimStep(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=5.0)


@pytest.fixture
def pool(tmp_path: Path) -> AdapterPool:
    return make_pool(tmp_path / "base")


def train(model: ClientModel, seed: int, *, backward: bool = True) -> Scores:
    return model.compute(make_data(("weights",), seed=seed), CROSS_ENTROPY, {}, backward=backward, max_tokens=8)


def weights(model: ClientModel) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.parameters.items()}


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_gradients_of_several_calls_are_those_of_one(pool: AdapterPool) -> None:
    one, several = ClientModel(pool, LORA), ClientModel(pool, LORA)
    data = make_data(("weights",), lengths=(5, 3, 7, 4))
    one.compute(data, CROSS_ENTROPY, {}, backward=True, max_tokens=100)
    for datum in data:
        several.compute([datum], CROSS_ENTROPY, {}, backward=True, max_tokens=100)
    for name, parameter in one.parameters.items():
        torch.testing.assert_close(several.parameters[name].grad, parameter.grad, rtol=1e-4, atol=1e-5)
    assert any(each.grad is not None and each.grad.abs().max() > 1e-2 for each in one.parameters.values())


def test_forward_alone_changes_no_gradient(pool: AdapterPool) -> None:
    model = ClientModel(pool, LORA)
    scores = train(model, 0, backward=False)
    assert all(each.grad is None for each in model.parameters.values())
    assert train(model, 0).loss == scores.loss
    before = {name: each.grad.clone() for name, each in model.parameters.items() if each.grad is not None}
    train(model, 1, backward=False)
    assert are_equal(before, {name: each.grad for name, each in model.parameters.items() if each.grad is not None})


def test_a_step_is_that_of_adamw(pool: AdapterPool) -> None:
    model, twin = ClientModel(pool, LORA), ClientModel(pool, LORA)
    optimizer = torch.optim.AdamW(twin.parameters.values(), 1e-2, (0.8, 0.7), 1e-6, 0.1)
    command = OptimStep(learning_rate=1e-2, beta1=0.8, beta2=0.7, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)
    for seed in range(3):
        train(model, seed)
        train(twin, seed)
        norm = torch.nn.utils.clip_grad_norm_(list(twin.parameters.values()), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert model.step(command) == {"grad_norm": float(norm), "version": seed + 1}
    assert are_equal(weights(model), weights(twin))


def test_a_step_without_gradients_is_refused(pool: AdapterPool) -> None:
    model = ClientModel(pool, LORA)
    with pytest.raises(CodecError, match="call forward_backward before"):
        model.step(STEP)
    assert model.version == 0


def test_a_gradient_that_is_not_finite_leaves_the_weights(pool: AdapterPool) -> None:
    model = ClientModel(pool, LORA)
    before = weights(model)
    data = make_data(("logprobs", "advantages"))
    data[0].inputs["advantages"][0] = 3e38
    model.compute(data * 4, LOSSES["importance_sampling"], {}, backward=True, max_tokens=100)
    with pytest.raises(CodecError, match="the step is left out"):
        model.step(STEP)
    assert are_equal(before, weights(model))
    with pytest.raises(CodecError, match="no gradients"):
        model.step(STEP)


def test_a_failed_call_leaves_the_gradients(pool: AdapterPool) -> None:
    model = ClientModel(pool, LORA)
    train(model, 0)
    before = {name: each.grad for name, each in model.parameters.items()}
    broken = Datum(np.array([10_000], np.int32), make_data(("weights",), lengths=(1,))[0].inputs)
    with pytest.raises(IndexError):
        model.compute([*make_data(("weights",)), broken], CROSS_ENTROPY, {}, backward=True, max_tokens=8)
    assert all(model.parameters[name].grad is each for name, each in before.items())


def test_a_state_continues_bit_for_bit(pool: AdapterPool, tmp_path: Path) -> None:
    """Also between forward_backward and optim_step: gradients are part of it."""
    path = tmp_path / "state.safetensors"
    model = ClientModel(pool, LORA)
    for seed in range(2):
        train(model, seed)
        model.step(STEP)
    train(model, 2)
    model.seq_id = 5
    model.save(path)
    other = ClientModel(pool, LORA)
    other.load(path)
    assert (other.version, other.seq_id) == (2, 5)
    for each in (model, other):
        train(each, 3)
        each.step(STEP)
        train(each, 4)
        each.step(STEP)
    assert are_equal(weights(model), weights(other))


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_adopted_weights_have_the_moments_or_none(pool: AdapterPool, tmp_path: Path, with_optimizer: bool) -> None:
    path = tmp_path / "state.safetensors"
    model = ClientModel(pool, LORA)
    train(model, 0)
    model.step(STEP)
    model.save(path)
    other = ClientModel(pool, LORA)
    train(other, 5)
    other.adopt(path, with_optimizer=with_optimizer)
    assert are_equal(weights(model), weights(other))
    for each in (model, other):
        train(each, 1)
        each.step(STEP)
    assert are_equal(weights(model), weights(other)) is with_optimizer


def test_what_gradients_are_of_is_kept_with_them(pool: AdapterPool, tmp_path: Path) -> None:
    model = ClientModel(pool, LORA)
    first, second = train(model, 0), train(model, 1)
    train(model, 2, backward=False)
    expected = Accumulated(first.loss + second.loss, 2 * len(LENGTHS), 2 * sum(LENGTHS))
    assert model.accumulated == expected
    model.save(tmp_path / "state")
    restored = ClientModel(pool, LORA)
    restored.load(tmp_path / "state")
    assert restored.accumulated == expected
    restored.step(STEP)
    assert restored.accumulated == Accumulated()


def test_a_state_of_an_earlier_build_is_loaded(pool: AdapterPool, tmp_path: Path) -> None:
    """It does not say what its gradients are of."""
    path = tmp_path / "state"
    ClientModel(pool, LORA).save(path)
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["about"])
    del about["accumulated"]
    save_file(load_file(path), path, {"about": json.dumps(about)})
    restored = ClientModel(pool, LORA)
    restored.load(path)
    assert restored.accumulated == Accumulated()


def test_weights_of_another_rank_or_other_layers_are_refused(pool: AdapterPool, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    ClientModel(pool, LORA).save(path)
    for lora in (Lora(rank=2, seed=7), Lora(rank=4, seed=7, train_mlp=False)):
        model = ClientModel(pool, lora)
        before = weights(model)
        with pytest.raises(CodecError, match="another rank or other layers"):
            model.adopt(path, with_optimizer=True)
        assert are_equal(before, weights(model))


def test_models_do_not_change_each_other(pool: AdapterPool) -> None:
    """One at learning rate 0 stays where it is, and one beside another trains as if it were alone."""
    alone = ClientModel(pool, LORA)
    for seed in range(3):
        train(alone, seed)
        alone.step(STEP)
    expected = weights(alone)
    alone.close()
    model, resting = ClientModel(pool, LORA), ClientModel(pool, Lora(rank=8, seed=1, train_attn=False))
    before = weights(resting)
    for seed in range(3):
        train(model, seed)
        train(resting, 10 + seed)
        model.step(STEP)
        resting.step(OptimStep(learning_rate=0.0))
    assert are_equal(weights(model), expected)
    assert are_equal(weights(resting), before)


@pytest.mark.parametrize(
    ("lora", "parts"),
    [
        (Lora(rank=2, seed=0, train_mlp=False, train_unembed=False), {"self_attn"}),
        (Lora(rank=2, seed=0, train_attn=False, train_unembed=False), {"mlp"}),
        (Lora(rank=2, seed=0, train_attn=False, train_mlp=False), {"lm_head"}),
        (Lora(rank=2, seed=0), {"self_attn", "mlp", "lm_head"}),
    ],
)
def test_the_wanted_layers_are_trained(pool: AdapterPool, lora: Lora, parts: set[str]) -> None:
    names = pool.parameters(pool.add(lora))
    assert {part for name in names for part in name.split(".") if part in ("self_attn", "mlp", "lm_head")} == parts


def test_an_adapter_of_experts_alone_is_refused(tmp_path: Path) -> None:
    """They are parameters of one layer, not linear layers; other parts of a mixture of experts are adapted."""
    pool = make_pool(tmp_path / "base", family="qwen3_moe")
    for lora in (Lora(rank=2, seed=0, train_attn=False, train_unembed=False),) * 2:
        with pytest.raises(CodecError, match="no linear layer for train_mlp alone, as experts take no adapters"):
            ClientModel(pool, lora)
    names = pool.parameters(pool.add(Lora(rank=2, seed=0)))
    assert {name.rsplit(".", 3)[1] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"}


def test_dense_layers_of_a_mixture_of_experts_are_adapted(tmp_path: Path) -> None:
    pool = make_pool(tmp_path / "base", family="glm4_moe")
    names = pool.parameters(pool.add(Lora(rank=2, seed=0, train_attn=False, train_unembed=False)))
    dense = {f"{middle}{name}_proj" for middle in ("", "shared_experts.") for name in ("gate", "up", "down")}
    assert {name.partition(".mlp.")[2].partition(".lora_")[0] for name in names} == dense


def test_initial_weights_depend_on_the_seed_alone(pool: AdapterPool) -> None:
    first = weights(ClientModel(pool, LORA))
    ClientModel(pool, Lora(rank=4, seed=8))
    assert are_equal(first, weights(ClientModel(pool, LORA)))
    assert not are_equal(first, weights(ClientModel(pool, Lora(rank=4, seed=8))))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_adapters_of_a_16_bit_base_take_small_steps_in_float32(tmp_path: Path, dtype: str) -> None:
    """In 16 bits, A would stay, and float16's moments of small gradients are 0."""
    model = ClientModel(make_pool(tmp_path / "base", dtype), LORA)
    train(model, 0)
    model.step(OptimStep(learning_rate=1e-5))  # A's gradient is 0, as B is
    before = weights(model)
    train(model, 1)
    model.step(OptimStep(learning_rate=1e-5))
    model.save(tmp_path / "state")
    for name, after in weights(model).items():
        assert after.dtype == torch.float32
        assert (after != before[name]).float().mean() > 0.9
    again = ClientModel(model._pool, LORA)
    again.load(tmp_path / "state")
    for each in (model, again):
        train(each, 2)
        each.step(STEP)
    assert are_equal(weights(model), weights(again))
