"""The adapter that a run starts from: keys that follow it, and what contradicts it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offbeat.deploy.config.checks.initial_adapter import KEY, check_adapter
from offbeat.deploy.config.hub import missing_models
from offbeat.deploy.config.loader import validate_tree

ARGS = "actor_train.model_args"
LAYERS = ("layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj", "layers.1.self_attn.q_proj")


def write_adapter(folder: Path, *, factors: dict[str, torch.Tensor] | None = None, **settings: Any) -> Path:
    """Write an adapter of rank 4 over layers of 8 inputs and 6 outputs."""
    folder.mkdir(exist_ok=True)
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(plain | settings))
    pairs = {"lora_A": torch.zeros(4, 8), "lora_B": torch.zeros(6, 4)}
    whole = {
        f"base_model.model.model.{name}.{kind}.weight": each.clone() for name in LAYERS for kind, each in pairs.items()
    }
    save_file(whole if factors is None else factors, folder / "adapter_model.safetensors")
    return folder


def issues(adapter: Path | str, tree: dict[str, Any] | None = None, **args: Any) -> dict[str, str]:
    model_args = {"adapter_name_or_path": str(adapter), **args}
    config = validate_tree({"actor_train": {"model_args": model_args}, **(tree or {})})
    return {issue.path: issue.message for issue in check_adapter(config)}


def test_keys_that_are_left_out_are_the_adapters(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", use_rslora=True, base_model_name_or_path="org/base")
    config = validate_tree({"actor_train": {"model_args": {"adapter_name_or_path": str(adapter), "lora_alpha": None}}})
    args = config.actor_train.model_args
    assert (args.lora_target, args.lora_rank, args.lora_alpha, args.use_rslora) == ("q_proj,v_proj", 4, 12.0, True)
    assert config.actor_train.training_args.learning_rate == 1e-2  # an adapter's, of a tiny policy
    assert issues(adapter, lora_rank=4, lora_alpha=12.0, use_rslora=True, lora_target="v_proj,self_attn.q_proj") == {}


@pytest.mark.parametrize(("key", "value"), [("use_rslora", True), ("lora_alpha", 4.0), ("lora_rank", 8)])
def test_a_resumed_runs_adapters_keep_their_scale(tmp_path: Path, key: str, value: Any) -> None:
    """The factors of the checkpoint at another scale are another policy, which the run went on from without a word."""
    write_adapter(tmp_path / "adapter")
    trained = {"lora_target": "q_proj,v_proj", "lora_rank": 4, "lora_alpha": 12.0}

    def found(**changes: Any) -> dict[str, str]:
        args = {"actor_train": {"model_args": trained | changes}}
        config = validate_tree({**args, "resume_from_checkpoint": str(tmp_path)})
        return {issue.path: issue.message for issue in check_adapter(config)}

    assert found() == {}
    assert "the adapters of the checkpoint" in found(**{key: value})[f"{ARGS}.{key}"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("lora_rank", 8, "8 contradicts the adapter .*, which has 4: leave it out"),
        ("lora_alpha", 4.0, "4 contradicts the adapter .*, which has 12"),
        ("use_rslora", True, "true contradicts the adapter .*, which has false"),
        ("lora_target", "q_proj", "q_proj contradicts the adapter .*, which is of q_proj,v_proj: leave it out"),
        ("lora_target", "q_proj,v_proj,o_proj", "which is of q_proj,v_proj"),
    ],
)
def test_keys_that_contradict_the_adapter_are_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    found = issues(write_adapter(tmp_path / "adapter"), **{key: value})
    assert list(found) == [f"{ARGS}.{key}"]
    assert re.search(message, found[f"{ARGS}.{key}"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "type IA3: only LORA"),
        ({"use_dora": True}, "PEFT's use_dora, which is not supported: merge it"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias=all"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa, which changes the base"),
        ({"r": 8}, "rank r is 8: only one rank"),
        ({"lora_alpha": None}, "lora_alpha None: both must be positive"),
    ],
)
def test_adapters_of_other_forms_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    assert message in issues(write_adapter(tmp_path / "adapter", **settings))[KEY]


def test_folders_without_an_adapter_are_refused(tmp_path: Path) -> None:
    assert "no such folder" in issues(tmp_path / "absent")[KEY]
    assert "has no adapter_config.json" in issues(tmp_path)[KEY]
    embedding = {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 8)}
    assert "only pairs of lora_A and lora_B" in issues(write_adapter(tmp_path / "embedding", factors=embedding))[KEY]
    adapter = write_adapter(tmp_path / "cut")
    (adapter / "adapter_model.safetensors").write_bytes(b"\xff" * 9)
    assert "can't be read" in issues(adapter)[KEY]
    (adapter / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in issues(adapter)[KEY]


def test_an_adapter_of_another_size_is_refused_with_its_base(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path="org/larger")
    base = tmp_path / "base"
    base.mkdir()
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(6, 16)}, base / "model.safetensors")
    assert issues(adapter, {"pretrain": str(base)})[KEY].endswith(
        "8 inputs and 6 outputs, and pretrain has 16 and 6: take its base (org/larger)"
    )


def write_base(folder: Path, names: tuple[str, ...]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    save_file({f"{name}.weight": torch.zeros(6, 8) for name in names}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("target", [None, "all-linear"])
def test_an_adapter_of_some_layers_is_refused_unless_its_layers_are_named(tmp_path: Path, target: str | None) -> None:
    """PEFT's `layers_to_transform`; the learner would adapt the others, too."""
    adapter = write_adapter(tmp_path / "adapter", layers_to_transform=[0, 1])
    others = ("model.layers.1.self_attn.v_proj", "model.layers.1.self_attn.o_proj", "visual.blocks.0.self_attn.q_proj")
    not_computed = "model.layers.2.self_attn.q_proj"  # of multi-token prediction, which transformers leaves out
    names = (*(f"model.{name}" for name in LAYERS), *others, not_computed)
    base = {"pretrain": str(write_base(tmp_path / "base", names))}
    found = issues(adapter, base, **({} if target is None else {"lora_target": target}))
    assert found == {
        f"{ARGS}.lora_target": f"{target or 'q_proj,v_proj'} names model.layers.1.self_attn.v_proj (1 in all), which the "
        f"adapter {adapter} has not: name its layers alone (such as model.layers.0.self_attn.q_proj)"
    }
    assert issues(adapter, base, lora_target=",".join(LAYERS)) == {}


def test_another_bases_name_is_a_remark(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter = write_adapter(tmp_path / "adapter", base_model_name_or_path="org/base")
    for pretrain in (tmp_path / "base", tmp_path / "models--org--base" / "snapshots" / "1"):
        assert issues(adapter, {"pretrain": str(pretrain)}) == {}
    assert not caplog.messages
    assert issues(adapter, {"pretrain": str(tmp_path / "other")}) == {}
    assert caplog.messages == [f"{adapter} was trained on org/base, and pretrain is {tmp_path / 'other'}"]


def test_an_adapters_folder_is_no_model(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    config = validate_tree({"pretrain": str(adapter)})
    (issue,) = check_adapter(config)
    assert issue.message == f"{adapter} is a LoRA adapter: set pretrain to its base, and {KEY} to the adapter"


def test_a_warm_start_and_a_service_of_the_reference_are_refused(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter")
    warm = {"warm_start": {"demos": "offbeat.envs.frozen_lake:demos", "tag": "A"}}
    assert "leave one of them out" in issues(adapter, warm)[KEY]
    served = {"use_kl_loss": True, "kl_loss_coef": 0.1, "reference": {"strategy_args": {"placement": "service"}}}
    assert "take learner" in issues(adapter, served)["reference.strategy_args.placement"]
    own = {**served, "reference": {**served["reference"], "model_args": {"model_name_or_path": str(tmp_path)}}}
    assert issues(adapter, own) == {}


def test_an_adapter_of_the_hub_is_resolved_as_models_are() -> None:
    tree = {"actor_train": {"model_args": {"adapter_name_or_path": "org/adapter", "lora_rank": 4}}}
    assert missing_models(tree) == ["org/adapter"]
    assert validate_tree(tree).actor_train.model_args.has_adapters
