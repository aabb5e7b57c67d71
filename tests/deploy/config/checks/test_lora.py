"""Publishing an adapter by itself, where the run around it makes that impossible."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offbeat.deploy.config.checks.lora import check_targets
from offbeat.deploy.config.checks.run import check_run
from offbeat.deploy.config.loader import CONFIGS, compose_tree, validate_tree

MAX_RUNS = "actor_infer.strategy_args.strategy_config.max_loras"
MAX_RANK = "actor_infer.strategy_args.strategy_config.max_lora_rank"
LORA = [f"{MAX_RANK}=16"]
TARGET = "actor_train.model_args.lora_target"


def problems(overrides: list[str]) -> dict[str, str]:
    config = validate_tree(compose_tree(CONFIGS / "recipes" / "lora.yaml", [*LORA, *overrides]))
    return {problem.path: problem.message for problem in check_run(config, cores=2)}


def test_lora_recipe_with_adapter_publishing_is_accepted() -> None:
    assert problems([]) == {}


@pytest.mark.parametrize(
    ("overrides", "path", "says"),
    [
        ([f"{MAX_RANK}=8"], MAX_RANK, "take 16"),
        ([f"{TARGET}='q_proj,lm_head'"], TARGET, "lm_head"),
        (["weights.transport=fs", "weights.anchor_every=4"], "weights.anchor_every", "leave it out"),
        (["weights.transport=nccl"], "weights.transport", "shm"),
    ],
)
def test_invalid_combinations_with_adapters_are_rejected(overrides: list[str], path: str, says: str) -> None:
    found = problems(overrides)
    assert says in found[path]
    assert set(found) <= {path, "actor_infer.device"}


@pytest.mark.parametrize(
    ("device", "dtype", "refused"), [("cuda", "float32", True), ("cuda", "bfloat16", False), ("cpu", "float32", False)]
)
def test_adapters_of_float32_are_rejected_on_gpus(device: str, dtype: str, refused: bool) -> None:
    found = problems([f"actor_infer.device={device}", f"actor_infer.model_args.dtype={dtype}"])
    assert ("bfloat16 or float16" in found.get("actor_infer.model_args.dtype", "")) == refused


@pytest.mark.parametrize("target", ["q_proj,foo_proj", "foo_proj"])
def test_targets_that_name_no_layer_are_rejected_with_those_that_do(target: str) -> None:
    found = problems([f"{TARGET}='{target}'"])
    assert "no layer foo_proj: take of down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in found[TARGET]
    assert problems([f"{TARGET}='layers.1.self_attn.q_proj,up_proj'"]) == {}


def target_issues(folder: Path, targets: str, layers: dict[str, tuple[int, ...]]) -> list[str]:
    save_file(
        {f"model.layers.0.{name}": torch.zeros(shape) for name, shape in layers.items()}, folder / "model.safetensors"
    )
    overrides = [f"pretrain={folder}", f"{TARGET}='{targets}'"]
    config = validate_tree(compose_tree(CONFIGS / "recipes" / "lora.yaml", overrides))
    return [each.message for each in check_targets(config)]


def test_layers_of_a_model_are_those_of_its_weights(tmp_path: Path) -> None:
    found = target_issues(tmp_path, "fc1,norm", {"mlp.fc1.weight": (2, 2), "norm.weight": (2,)})
    assert found == ["the model has no layer norm: take of fc1, or all-linear"]


@pytest.mark.parametrize(
    "experts",
    [
        {"mlp.experts.0.up_proj.weight": (2, 2), "mlp.gate.weight": (4, 2)},
        {"mlp.experts.up_proj": (4, 2, 2), "mlp.gate.weight": (4, 2)},
    ],
)
def test_experts_and_routers_are_refused_as_targets(tmp_path: Path, experts: dict[str, tuple[int, ...]]) -> None:
    """In memory they are one stacked parameter each, not linear layers."""
    dense = {"self_attn.q_proj.weight": (2, 2)}
    (says,) = target_issues(tmp_path, "q_proj,up_proj,gate", dense | experts)
    assert says.startswith("up_proj, gate are of experts and their router alone, which are stacked in memory")
    assert says.endswith("take no adapter: take of q_proj, or all-linear")
    shared = {"mlp.shared_experts.up_proj.weight": (2, 2)}
    assert target_issues(tmp_path, "q_proj,up_proj", dense | experts | shared) == []


def test_layers_of_a_multimodal_model_are_those_of_its_language_model(tmp_path: Path) -> None:
    shapes = {"model.visual.blocks.0.mlp.linear_fc1": (2, 2), "model.language_model.layers.0.self_attn.q_proj": (2, 2)}
    weights = {f"{name}.weight": shape for name, shape in shapes.items()}
    (says,) = target_issues(tmp_path, "q_proj,linear_fc1", weights)
    assert says == "the model has no layer linear_fc1: take of q_proj, or all-linear"


def test_a_router_of_its_own_is_refused_as_a_target(tmp_path: Path) -> None:
    """As in Granite 3 MoE, whose experts have no names of their own."""
    mixture = {"moe.router.layer.weight": (4, 2), "moe.input_linear.weight": (4, 2, 2)}
    (says,) = target_issues(tmp_path, "q_proj,router.layer", {"self_attn.q_proj.weight": (2, 2)} | mixture)
    assert says.startswith("router.layer are of experts and their router alone")
    assert says.endswith("take of q_proj, or all-linear")


@pytest.mark.parametrize("target", ["all-linear", "c_attn"])
def test_adapters_of_gpt2_are_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (says,) = target_issues(tmp_path, target, {"attn.c_attn.weight": (2, 6)})
    assert says == "weights of gpt2 are transposed (Conv1D), and take no adapter: leave it out"


def test_max_lora_rank_without_lora_target_is_rejected() -> None:
    config = validate_tree(compose_tree(CONFIGS / "quickstart.yaml", LORA))
    (found,) = check_run(config, cores=2)
    assert (found.path, TARGET in found.message) == (MAX_RANK, True)


def test_adapter_settings_have_pefts_keys() -> None:
    config = validate_tree(compose_tree(CONFIGS / "recipes" / "lora.yaml", LORA))
    assert config.adapter_settings == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "r": 16,
        "lora_alpha": 32,
        "use_rslora": False,
        "target_modules": "all-linear",
    }
    merged = validate_tree(compose_tree(CONFIGS / "recipes" / "lora.yaml"))
    assert merged.adapter_settings is None


@pytest.mark.parametrize(
    ("overrides", "path", "says"),
    [
        (["actor_infer.on_weight_update=recompute"], "actor_infer.on_weight_update", "of all runs"),
        (["actor_infer.keep_sessions=true"], "actor_infer.keep_sessions", "do not stay"),
        ([f"{MAX_RANK}=null"], MAX_RUNS, "set max_lora_rank, too"),
        (["actor_infer.strategy_args.strategy_name=hf_infer"], MAX_RUNS, "hf_infer has"),
    ],
)
def test_engines_of_several_runs_take_vllm_with_adapters_and_kept_caches(
    overrides: list[str], path: str, says: str
) -> None:
    assert problems([f"{MAX_RUNS}=4"]) == {}
    found = problems([f"{MAX_RUNS}=4", *overrides])
    assert says in found[path]
    assert set(found) == {path}
