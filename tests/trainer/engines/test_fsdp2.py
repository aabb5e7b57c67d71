"""The engine on PyTorch's own sharding: the same steps as the DeepSpeed engine's, and checkpoints to the bit. With two
processes: tests/integration/test_learner_engine.py."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from offbeat.trainer.checks.learner import check_learner
from offbeat.trainer.config.actor_train import ModelArgs, StrategyArgs, TrainingArgs
from offbeat.trainer.engines.base import Hyperparameters
from offbeat.trainer.engines.fsdp2 import FSDP2Engine
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_critic, load_policy
from tests.integration.learner_rank import SMOOTH, fixed_batch
from tests.trainer.engines.comparing import (
    assert_offloading_changes_nothing,
    assert_overflow_is_skipped,
    assert_same,
    assert_scale_ends_at_one,
    assert_steps_agree,
    decaying_groups,
    nll,
    weights_of,
)
from tests.trainer.learner.harness import learner_config

pytestmark = pytest.mark.slow

HYPER = Hyperparameters(learning_rate=1e-2, weight_decay=0.1)


def engine(folder: Path, ranks: Ranks, dtype: str = "float32", training: TrainingArgs = SMOOTH) -> FSDP2Engine:
    return FSDP2Engine(load_policy(folder, ModelArgs.model_validate({"dtype": dtype}), seed=1), training, ranks)


def test_a_step_is_torch_adamw_on_the_clipped_gradient(folder: Path, ranks: Ranks) -> None:
    ours = engine(folder, ranks, training=SMOOTH.model_copy(update={"max_grad_norm": 0.5}))
    twin = load_policy(folder, ModelArgs(), seed=1)
    optimizer = torch.optim.AdamW(decaying_groups(twin, 0.1), lr=1e-2, betas=(0.9, 0.95), eps=1e-3)
    for _ in range(3):
        outcome = ours.train(fixed_batch(), nll, HYPER)
        optimizer.zero_grad()
        sum(nll(0, twin(x)) for x in fixed_batch()).backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.step()
        assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-5)
    expected = {name.removeprefix("model."): p.detach() for name, p in twin.named_parameters()}
    assert_same(weights_of(ours), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_states_come_back_as_they_were(folder: Path, ranks: Ranks, dtype: str) -> None:
    assert_offloading_changes_nothing(engine(folder, ranks, dtype), engine(folder, ranks, dtype))


def test_a_loss_that_is_not_finite_changes_nothing(folder: Path, ranks: Ranks) -> None:
    policy, undisturbed = engine(folder, ranks), engine(folder, ranks)
    for each in (policy, undisturbed):
        each.train(fixed_batch(), nll, HYPER)
    before = weights_of(policy)
    outcome = policy.train(fixed_batch(), lambda i, said: nll(i, said) * (math.nan if i == 1 else 1.0), HYPER)
    assert not outcome.applied
    assert_same(weights_of(policy), before)
    for each in (policy, undisturbed):
        assert each.train(fixed_batch(), nll, HYPER).applied
    assert_same(weights_of(policy), weights_of(undisturbed))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_loaded_engine_resumes_exactly(folder: Path, ranks: Ranks, dtype: str, tmp_path: Path) -> None:
    saved = engine(folder, ranks, dtype)
    saved.train(fixed_batch(), nll, HYPER)
    saved.save(tmp_path)
    saved.train(fixed_batch(), nll, HYPER)
    fresh = engine(folder, ranks, dtype)
    fresh.load(tmp_path)
    fresh.train(fixed_batch(), nll, HYPER)
    assert_same(weights_of(saved), weights_of(fresh))


def test_a_checkpoint_before_the_first_step_leaves_that_step_as_it_is(
    folder: Path, ranks: Ranks, tmp_path: Path
) -> None:
    undisturbed, saved, loaded = (engine(folder, ranks) for _ in range(3))
    saved.save(tmp_path)
    loaded.load(tmp_path)
    for each in (undisturbed, saved, loaded):
        each.train(fixed_batch(), nll, HYPER)
    for each in (saved, loaded):
        assert_same(weights_of(each), weights_of(undisturbed), atol=0.0)


def test_a_checkpoint_after_a_skipped_step_of_the_head_alone_is_resumed(
    folder: Path, ranks: Ranks, tmp_path: Path
) -> None:
    saved, loaded = (
        FSDP2Engine(load_policy(folder, ModelArgs(), seed=1, value_head=True), SMOOTH, ranks) for _ in range(2)
    )
    head_alone = replace(HYPER, head_alone=True)
    assert not saved.train(fixed_batch(), lambda _, said: said.values.sum() * math.nan, head_alone).applied
    saved.save(tmp_path)
    loaded.load(tmp_path)
    for each in (saved, loaded):
        assert each.train(fixed_batch(), lambda _, said: said.values.sum(), HYPER).applied
    assert_same(weights_of(loaded), weights_of(saved), atol=0.0)


def test_loaded_engine_keeps_its_current_settings(folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    saved = engine(folder, ranks)
    saved.train(fixed_batch(), nll, HYPER)
    saved.save(tmp_path)
    saved.train(fixed_batch(), nll, HYPER)
    name = "model.layers.0.mlp.up_proj.weight"
    for given in ({"adam_beta1": 0.5}, {"adam_beta2": 0.5}, {"adam_epsilon": 0.1}, {"max_grad_norm": 1e-4}):
        fresh = engine(folder, ranks, training=SMOOTH.model_copy(update=given))
        fresh.load(tmp_path)
        fresh.train(fixed_batch(), nll, HYPER)
        assert not torch.equal(weights_of(fresh)[name], weights_of(saved)[name]), given


def test_a_state_with_other_exemptions_from_decay_is_refused(folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    engine(folder, ranks).save(tmp_path)
    with pytest.raises(RuntimeError, match="decay_all_weights=false"):
        engine(folder, ranks, training=SMOOTH.model_copy(update={"decay_all_weights": True})).load(tmp_path)


def test_a_folder_without_a_state_is_refused(folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="has no state"):
        engine(folder, ranks).load(tmp_path)


def test_bfloat16_weights_gather_steps_too_small_for_them(folder: Path, ranks: Ranks) -> None:
    policy = engine(folder, ranks, "bfloat16")
    before = weights_of(policy)
    for _ in range(40):
        policy.train(fixed_batch(), nll, Hyperparameters(1e-5, 0.0))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert before[name].dtype == torch.bfloat16
    assert not torch.equal(before[name], weights_of(policy)[name])


def test_float16_skips_overflows_and_resumes_with_its_scale(folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    assert_overflow_is_skipped(lambda: engine(folder, ranks, "float16"), tmp_path)


def test_float16_steps_are_those_of_float32_but_for_rounding(folder: Path, ranks: Ranks) -> None:
    half, full = engine(folder, ranks, "float16"), engine(folder, ranks)
    assert_steps_agree(half, full)


def test_a_loss_that_is_never_finite_ends_at_the_smallest_scale(folder: Path, ranks: Ranks) -> None:
    assert_scale_ends_at_one(engine(folder, ranks, "float16"))


def test_a_reset_optimizer_forgets_its_moments(folder: Path, ranks: Ranks) -> None:
    used, fresh = engine(folder, ranks), engine(folder, ranks)
    used.train(fixed_batch(), nll, Hyperparameters(0.0, 0.0))
    used.reset_optimizer()
    for each in (used, fresh):
        each.train(fixed_batch(), nll, HYPER)
    # Adam's count of steps starts anew as well
    assert_same(weights_of(used), weights_of(fresh))


def test_a_critic_learns(folder: Path, ranks: Ranks) -> None:
    made = FSDP2Engine(load_critic(folder, ModelArgs(), seed=1), TrainingArgs(), ranks)

    def miss(_: int, values: Tensor) -> Tensor:
        return ((values - 1.0) ** 2).sum()

    first = sum(float(miss(0, values)) for values in made.infer(fixed_batch()))
    for _ in range(5):
        made.train(fixed_batch(), miss, HYPER)
    assert sum(float(miss(0, values)) for values in made.infer(fixed_batch())) < 0.5 * first


@pytest.mark.parametrize("given", [{"zero_stage": 2}, {"strategy_config": {"a": 1}}])
def test_deepspeeds_settings_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="strategy_name=deepspeed_train"):
        StrategyArgs.model_validate({"strategy_name": "fsdp2_train"} | given)


def test_adapters_are_kept_in_float32_beside_a_base_in_bfloat16(folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    def build() -> FSDP2Engine:
        args = ModelArgs(lora_target="q_proj,down_proj", lora_rank=2, dtype="bfloat16")
        return FSDP2Engine(load_policy(folder, args, seed=1), SMOOTH, ranks)

    saved, resumed = build(), build()
    for name, parameter in saved._module.named_parameters():
        assert parameter.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16), name
    start = weights_of(saved)
    for _ in range(40):
        saved.train(fixed_batch(), nll, Hyperparameters(1e-5, 0.0))
    saved.save(tmp_path)
    resumed.load(tmp_path)
    for each in (saved, resumed):
        each.train(fixed_batch(), nll, HYPER)
    assert_same(weights_of(saved), weights_of(resumed))
    changed = {name for name, tensor in weights_of(saved).items() if not torch.equal(tensor, start[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "down_proj"}


@pytest.mark.parametrize("split", [{}, {"tp_size": 2}, {"pp_size": 2}])
def test_adapters_are_accepted_but_for_a_full_kl_to_their_base(split: dict[str, int]) -> None:
    strategy = {"strategy_name": "fsdp2_train"} | split
    train = {"model_args": {"lora_target": "all-linear"}, "num_processes": 2, "strategy_args": strategy}
    settings = {"actor_train": train, "use_kl_loss": True, "kl_loss_coef": 0.1}
    assert list(check_learner(learner_config(**settings))) == []
    (issue,) = check_learner(learner_config(**settings, kl_loss_type="full"))
    assert issue.path == "kl_loss_type"
    assert "take k3" in issue.message


def test_a_configuration_that_was_written_out_in_full_is_read_again() -> None:
    config = StrategyArgs(strategy_name="fsdp2_train")
    assert StrategyArgs.model_validate_json(config.model_dump_json()) == config
