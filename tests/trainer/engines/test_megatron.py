"""The engine on Megatron's model: the same steps as the DeepSpeed engine's on the transformers model."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat.trainer.config.actor_train import ModelArgs, StrategyArgs, TrainingArgs
from offbeat.trainer.engines.base import Hyperparameters
from offbeat.trainer.engines.deepspeed import DeepSpeedEngine
from offbeat.trainer.engines.megatron import MegatronEngine
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.models.export import export_weights
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.packing import PackedInput
from tests.integration.learner_rank import SMOOTH, fixed_batch
from tests.trainer.engines.comparing import assert_offloading_changes_nothing, assert_same, nll, weights_of

HYPER = Hyperparameters(learning_rate=1e-2, weight_decay=0.1)
SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
EXPERTS: dict[str, Any] = {"num_experts": 48, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PARENTS = torch.tensor([-1, 0, 0])
"""Blocks of a tree: a prefix and two continuations."""
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 16},
    "llama": {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 40, "norm_topk_prob": False},
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "norm_topk_prob": True},
}


def write_model(folder: Path, model_type: str, **changes: Any) -> None:
    config = AutoConfig.for_model(model_type, **SIZES, **MODELS[model_type], **changes)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_model(tmp_path / "model", request.param)
    return tmp_path / "model"


@pytest.fixture(params=["qwen2", "qwen3_moe"])
def typical(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_model(tmp_path / "model", request.param)
    return tmp_path / "model"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    with process_group(alone := ranks_of_environment("cpu")):
        yield alone


def engine(folder: Path, ranks: Ranks, training: TrainingArgs = SMOOTH) -> MegatronEngine:
    return MegatronEngine(load_policy(folder, ModelArgs(), seed=1), training, ranks)


def test_steps_are_those_of_the_transformers_model(folder: Path, ranks: Ranks) -> None:
    """Weights by its names, read back from a checkpoint's export; some experts get no token."""
    twin = DeepSpeedEngine(load_policy(folder, ModelArgs(), seed=1), SMOOTH, StrategyArgs(), ranks)
    megatron = engine(folder, ranks)
    assert_same(weights_of(megatron), weights_of(twin))
    for ours, theirs in zip(megatron.infer(fixed_batch()), twin.infer(fixed_batch()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    for _ in range(3):
        outcomes = [each.train(fixed_batch(), nll, HYPER) for each in (megatron, twin)]
        assert outcomes[0].grad_norm == pytest.approx(outcomes[1].grad_norm, rel=1e-4)
    assert_same(weights_of(megatron), weights_of(twin), atol=2e-5)
    export_weights(folder, megatron.tensors())
    exported = AutoModelForCausalLM.from_pretrained(folder).named_parameters()
    assert_same(dict(exported), weights_of(megatron))


def test_a_loaded_engine_resumes_exactly(typical: Path, ranks: Ranks, tmp_path: Path) -> None:
    saved, fresh = engine(typical, ranks), engine(typical, ranks)
    saved.train(fixed_batch(), nll, HYPER)
    saved.save(tmp_path / "state")
    fresh.load(tmp_path / "state")
    outcomes = [each.train(fixed_batch(), nll, HYPER) for each in (saved, fresh)]
    assert outcomes[0] == outcomes[1]
    assert_same(weights_of(saved), weights_of(fresh))


def test_a_state_of_another_model_or_engine_is_refused(typical: Path, ranks: Ranks, tmp_path: Path) -> None:
    engine(typical, ranks).save(tmp_path / "state")
    write_model(tmp_path / "other", "qwen3")
    with pytest.raises(RuntimeError, match=r"no state of this model: model\..* is missing, or of another shape"):
        engine(tmp_path / "other", ranks).load(tmp_path / "state")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RuntimeError, match="has no state of this engine"):
        engine(typical, ranks).load(tmp_path / "empty")
    with pytest.raises(RuntimeError, match="decay_all_weights=false"):
        engine(typical, ranks, SMOOTH.model_copy(update={"decay_all_weights": True})).load(tmp_path / "state")


def test_several_processes_are_refused(typical: Path, ranks: Ranks) -> None:
    """Their number is the configuration's or that of `attach --nproc`, and no gradient would be summed."""
    with pytest.raises(ValueError, match="one process, but the policy has 2"):
        engine(typical, replace(ranks, world_size=2))


def test_offloaded_states_come_back_as_they_were(typical: Path, ranks: Ranks) -> None:
    assert_offloading_changes_nothing(engine(typical, ranks), engine(typical, ranks))


def test_a_loss_that_is_not_finite_changes_nothing(typical: Path, ranks: Ranks) -> None:
    policy = engine(typical, ranks)
    before = weights_of(policy)
    outcome = policy.train(fixed_batch(), lambda i, said: nll(i, said) * (math.nan if i == 1 else 1.0), HYPER)
    assert not outcome.applied
    assert math.isnan(outcome.grad_norm)
    assert_same(weights_of(policy), before)


def test_a_reset_optimizer_forgets_its_moments(typical: Path, ranks: Ranks) -> None:
    used, fresh = engine(typical, ranks), engine(typical, ranks)
    used.train(fixed_batch(), nll, Hyperparameters(0.0, 0.0))
    used.reset_optimizer()
    for each in (used, fresh):
        each.train(fixed_batch(), nll, HYPER)
    assert_same(weights_of(used), weights_of(fresh))


def test_a_shared_prefix_changes_no_logprob(typical: Path, ranks: Ranks) -> None:
    """Two sequences of 5 tokens whose first 3 are computed once."""
    policy = engine(typical, ranks)
    first, second = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1, 2, 3, 6, 7])
    flat = PackedInput.of(torch.cat([first, second]), torch.tensor([0, 5, 10]), torch.tensor([3, 4, 8, 9]))
    tree = PackedInput.of(
        torch.cat([first, second[3:]]), torch.tensor([0, 3, 5, 7]), torch.tensor([3, 4, 5, 6]), parents=PARENTS
    )
    torch.testing.assert_close(policy.infer([tree])[0], policy.infer([flat])[0], rtol=0, atol=1e-5)


def test_the_watchdog_sees_each_pass(typical: Path, ranks: Ranks) -> None:
    source, kicks = load_policy(typical, ModelArgs(), seed=1), list[int]()
    source.model.base_model.register_forward_pre_hook(lambda *_: kicks.append(1))
    MegatronEngine(source, SMOOTH, ranks).train(fixed_batch(), nll, HYPER)
    assert len(kicks) == len(fixed_batch())
