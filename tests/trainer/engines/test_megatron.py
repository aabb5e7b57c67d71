"""The engine on Megatron's model: the same steps as the DeepSpeed engine's on the transformers model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat.trainer.config.actor_train import ModelArgs, StrategyArgs, TrainingArgs
from offbeat.trainer.engines.base import Hyperparameters
from offbeat.trainer.engines.deepspeed import DeepSpeedEngine
from offbeat.trainer.engines.megatron import MegatronEngine
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.models.export import export_weights
from offbeat.trainer.models.loading import load_policy
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
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
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


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    with process_group(alone := ranks_of_environment("cpu")):
        yield alone


def engine(folder: Path, ranks: Ranks, training: TrainingArgs = SMOOTH) -> MegatronEngine:
    return MegatronEngine(load_policy(folder, ModelArgs(), seed=1), training, ranks)


def saved_weights(folder: Path, model: MegatronEngine) -> dict[str, Tensor]:
    """Load exported weights into a transformers model."""
    export_weights(folder, model.tensors())
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def test_steps_are_those_of_the_transformers_model(folder: Path, ranks: Ranks) -> None:
    megatron = engine(folder, ranks)
    twin = DeepSpeedEngine(load_policy(folder, ModelArgs(), seed=1), SMOOTH, StrategyArgs(), ranks)
    for ours, theirs in zip(megatron.infer(fixed_batch()), twin.infer(fixed_batch()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    for _ in range(3):
        outcomes = [each.train(fixed_batch(), nll, HYPER) for each in (megatron, twin)]
        assert outcomes[0].grad_norm == pytest.approx(outcomes[1].grad_norm, rel=1e-4)
    assert_same(saved_weights(folder, megatron), weights_of(twin), atol=2e-5)
