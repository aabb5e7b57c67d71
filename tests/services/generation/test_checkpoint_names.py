"""Learners' names of mixtures of experts, as checkpoints and vLLM's models have them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat.services.generation.checkpoint_names import FUSED, checkpoint_tensors, engine_tensors
from offbeat.services.process import free_port
from offbeat.trainer.models.lora import named_weights
from tests.families import EXPERTS, LATENT, ROUTED, write_family

pytestmark = pytest.mark.slow

HEADS = {"head_dim": 16}
FOUR = EXPERTS | {"num_experts": 4}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
CHANGES: dict[str, dict[str, Any]] = {
    "cohere2_moe": FOUR | HEADS,
    "deepseek_v2": {},
    "deepseek_v3": {},
    "dots1": ROUTED | HEADS,
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0,
        "moe_layer_end_index": 1,
    },
    "exaone_moe": FOUR | HEADS | {"num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
    "glm4_moe": {},
    "glm4_moe_lite": ROUTED | LATENT | {"num_key_value_heads": 4},
    "gpt_oss": LOCAL | HEADS,
    "granitemoe": LOCAL,
    "granitemoeshared": LOCAL | {"shared_intermediate_size": 32},
    "hunyuan_v1_moe": HEADS | {"num_experts": 4, "moe_topk": 2, "num_shared_expert": 1},
    "mellum": FOUR | HEADS,
    "minimax_m2": LOCAL | HEADS | {"rotary_dim": 8},
    "mixtral": {},
    "olmoe": FOUR,
    "phimoe": LOCAL | {"attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "solar_open": ROUTED | HEADS,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "minimax_m2": {"scoring_func": "sigmoid", "use_routing_bias": True},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
}
"""What published models' config.json have beyond transformers' own."""


def test_a_prefix_that_no_name_had_is_not_added() -> None:
    config, tensor = SimpleNamespace(model_type="gemma3n_text"), torch.ones(2)
    assert [name for name, _ in checkpoint_tensors(config, [("model.norm.weight", tensor)])] == ["model.norm.weight"]


@pytest.fixture(scope="module")
def distributed() -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
    with set_current_vllm_config(VllmConfig()):
        initialize_model_parallel(1)
    yield
    cleanup_dist_env_and_memory()


def load(folder: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Load tensors into vLLM's model; return its parameters."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=64)
    config = arguments.create_engine_config()
    before = torch.get_default_dtype()
    with set_current_vllm_config(config):
        torch.set_default_dtype(torch.float32)
        model = initialize_model(config)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        model.load_weights(iter(tensors.items()))
    torch.set_default_dtype(before)
    return {name: parameter.data for name, parameter in model.named_parameters()}


@pytest.mark.usefixtures("distributed")
@pytest.mark.parametrize("family", CHANGES)
def test_vllm_loads_what_a_learner_publishes_as_a_checkpoint(tmp_path: Path, family: str) -> None:
    write_family(tmp_path, family, **CHANGES[family])
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | PUBLISHED.get(family, {})))
    checkpoint = load_file(tmp_path / "model.safetensors")
    published = {name: each.detach() for name, each in named_weights(model)}
    written = dict(checkpoint_tensors(model.config, published.items()))
    assert written.keys() == checkpoint.keys()
    assert all(torch.equal(written[name], each) for name, each in checkpoint.items())
    assert dict(checkpoint_tensors(model.config, checkpoint.items())).keys() == checkpoint.keys()
    tensors = dict(engine_tensors(model.config, published.items()))
    assert (tensors.keys() == checkpoint.keys()) is (family not in FUSED)
    expected, loaded = load(tmp_path, checkpoint), load(tmp_path, tensors)
    assert not any(each.isnan().any() for each in loaded.values())
    assert all(torch.equal(loaded[name], each) for name, each in expected.items())
