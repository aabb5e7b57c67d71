"""Unknown engine arguments, and a model that differs from the checkpoint's, are found before the start."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.config.checks.run import check_run, check_settings
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import compose_tree, load_run, validate_tree
from offbeat.deploy.run_setup import POLICY, load_architecture, write_policy
from offbeat.services.generation.config import EngineStrategy, VllmConfig
from offbeat.services.generation.vllm.engine_arguments import engine_argument_names
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.training.checkpoint import LEARNER, MANIFEST
from tests.paths import CONFIGS, QUICKSTART

GATED_DELTA = {"num_attention_heads": 12, "linear_num_key_heads": 12, "layer_types": ["linear_attention"]}


def problems(**changes: Any) -> dict[str, str]:
    config = load_run(QUICKSTART).model_copy(update=changes)
    return {issue.path: issue.message for issue in check_run(config, cores=2)}


def with_engine_kwargs(**kwargs: Any) -> dict[str, str]:
    strategy = EngineStrategy(strategy_config=VllmConfig.model_validate(kwargs))
    return problems(actor_infer=load_run(QUICKSTART).actor_infer.model_copy(update={"strategy_args": strategy}))


def checkpoint(folder: Path, **changes: Any) -> Path:
    """Write the part of a checkpoint that determines its model."""
    path = folder / "checkpoints" / "step-000007"
    path.mkdir(parents=True)
    path.joinpath("config.json").write_text(json.dumps(load_architecture(load_run(QUICKSTART)) | changes))
    for name in (LEARNER, MANIFEST):
        path.joinpath(name).write_text("{}")
    return path


def test_an_unknown_engine_argument_names_the_nearest():
    message = "vLLM has no such engine argument; did you mean `max_num_batched_tokens`?"
    assert with_engine_kwargs(max_num_batched_token=512) == {
        f"{ENGINE}.max_num_batched_token": message,
    }
    (only,) = with_engine_kwargs(foo=1).values()
    assert only.startswith("vLLM has no such engine argument")


def test_known_engine_arguments_are_accepted():
    assert with_engine_kwargs(max_num_batched_tokens=512, enable_log_requests=True) == {}


@pytest.mark.slow
def test_the_names_are_those_of_the_installed_vllm():
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert set(engine_argument_names()) == {name for name in fields if not name.startswith("_")}


def test_a_run_resumes_with_the_model_of_its_checkpoint(tmp_path: Path):
    checkpoint(tmp_path)
    assert problems(output_dir=tmp_path, resume_from_checkpoint=True) == {}


@pytest.mark.parametrize("by_path", [False, True])
def test_another_model_than_the_checkpoints_is_named_with_its_differences(tmp_path: Path, by_path: bool):
    path = checkpoint(tmp_path, hidden_size=128, vocab_size=99)
    found = problems(output_dir=tmp_path, resume_from_checkpoint=path if by_path else True)
    assert "hidden_size 64 instead of 128" in found["tiny"]
    assert "instead of 99" in found["tiny"]
    assert str(path) in found["tiny"]


def test_a_changed_model_folder_is_named(tmp_path: Path):
    checkpoint(tmp_path, architectures=["LlamaForCausalLM"])
    config = load_run(QUICKSTART)
    model = tmp_path / "model"
    model.mkdir()
    model.joinpath("config.json").write_text(json.dumps(load_architecture(config)))
    found = problems(output_dir=tmp_path, resume_from_checkpoint=True, pretrain=str(model))["pretrain"]
    assert 'architectures ["Qwen2ForCausalLM"] instead of ["LlamaForCausalLM"]' in found
    assert found.startswith(f"{model} does not fit the checkpoint ")


def test_a_runs_policy_without_weights_is_refused_if_the_run_has_trained(tmp_path: Path):
    config, policy = load_run(QUICKSTART), tmp_path / POLICY
    policy.mkdir()
    write_policy(config, policy)
    assert "pretrain" not in problems(pretrain=str(policy))  # it begins with random weights, as that run did
    path = checkpoint(tmp_path)
    assert f"take its newest checkpoint, {path}" in problems(pretrain=str(policy))["pretrain"]
    (policy / "model.safetensors").touch()
    assert "has no weights" not in problems(pretrain=str(policy)).get("pretrain", "")


def test_a_default_that_one_side_leaves_out_is_no_difference(tmp_path: Path):
    checkpoint(tmp_path, head_dim=32)
    assert problems(output_dir=tmp_path, resume_from_checkpoint=True) == {}


@pytest.mark.parametrize("shape", [{}, {"hidden_size": 128}])
def test_a_reference_that_follows_the_policy_has_its_shape(shape: dict[str, int], tmp_path: Path):
    config = load_run(QUICKSTART)
    tmp_path.joinpath("config.json").write_text(json.dumps(load_architecture(config) | shape))
    key = "reference.model_args.model_name_or_path"
    kl = [f"{key}={tmp_path}", "use_kl_loss=true", "kl_loss_coef=0.1"]
    found, fixed = (
        {
            issue.path: issue.message
            for issue in check_settings(validate_tree(compose_tree(QUICKSTART, changes)), cores=8)
        }
        for changes in ([*kl, "ref_model_sync_steps=5"], kl)
    )
    assert ("hidden_size 128 instead of 64" in found.get(key, "")) == bool(shape)
    assert key not in fixed
    checkpoint(tmp_path)
    resumed = [*kl, "ref_model_sync_steps=5", "resume_from_checkpoint=true", f"output_dir={tmp_path}"]
    assert not check_settings(validate_tree(compose_tree(QUICKSTART, resumed)), cores=8), "a warning"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (("tp_size=2", "num_processes=2"), ""),
        (("pp_size=2", "num_processes=2"), ""),
        (("tp_size=2",), "tp_size 2 does not divide the 1 process"),
        (("pp_size=2", "num_processes=3"), "pp_size 2 does not divide the 3 process"),
        (("tp_size=2", "pp_size=2", "num_processes=2"), "tp_size 2 x pp_size 2 does not divide the 2 process"),
        (("tp_size=3", "num_processes=3"), "num_attention_heads, 2, is not a multiple"),
        (("ulysses_size=2", "num_processes=2"), ""),
        (("ulysses_size=2",), "ulysses_size 2 does not divide the 1 process"),
        (("ulysses_size=4", "num_processes=4"), "num_attention_heads, 2, is not a multiple"),
        (("pp_size=5", "num_processes=5"), "num_hidden_layers, 4, are fewer: take at most 4"),
    ],
)
def test_layers_are_split_over_processes_that_fit(changes: tuple[str, ...], says: str):
    values = [f"actor_train.{'' if 'num_' in change else 'strategy_args.'}{change}" for change in changes]
    tree = compose_tree(QUICKSTART, ["actor_train.strategy_args.strategy_name=fsdp2_train", *values])
    issues = {issue.path: issue.message for issue in check_settings(validate_tree(tree), cores=8)}
    message = issues.get(f"actor_train.strategy_args.{changes[0].partition('=')[0]}", "")
    assert says in message
    assert bool(says) == bool(message)


@pytest.mark.parametrize(("heads", "says"), [(4, ""), (3, "num_attention_heads, 3, is not a multiple")])
@pytest.mark.parametrize("key", ["tp_size", "ulysses_size"])
def test_a_critics_layers_are_split_like_the_policys(key: str, heads: int, says: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(
        json.dumps(load_architecture(load_run(QUICKSTART)) | {"num_attention_heads": heads})
    )
    strategy = f"strategy_args={{strategy_name: fsdp2_train, {key}: 2}}"
    critic = ["adv_estimator=gae", f"critic.model_args.model_name_or_path={tmp_path}"]
    changes = [*critic, f"actor_train.{strategy}", "actor_train.num_processes=2"]
    issues = check_settings(validate_tree(compose_tree(QUICKSTART, changes)), cores=8)
    message = {issue.path: issue.message for issue in issues}.get(f"actor_train.strategy_args.{key}", "")
    assert says in message
    assert (f"the critic {tmp_path} too" in message) == bool(says)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_attention_heads": 12, "layer_types": ["full_attention", "conv"]}, "layers of conv are not divided"),
        ({"num_attention_heads": 12, "linear_num_key_heads": 16}, "linear_num_key_heads, 16, is not a multiple"),
        (GATED_DELTA | {"model_type": "qwen3_next"}, ""),
        (GATED_DELTA | {"model_type": "olmo_hybrid"}, "recurrent layers of olmo_hybrid"),
        ({"num_attention_heads": 12, "model_type": "falcon_h1"}, "layers of hybrid are not divided"),
        ({"num_attention_heads": 12, "hybrid_override_pattern": "M*-"}, "layers of mamba are not divided"),
        ({"num_attention_heads": 12, "attn_logit_softcapping": 50.0}, "logits are capped"),
        ({"vision_config": {"depth": 1}, "text_config": {"num_attention_heads": 5}}, "num_attention_heads, 5, is not"),
        ({"vision_config": {"depth": 1}, "text_config": {"num_attention_heads": 12}}, ""),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, "num_key_value_heads, 4, is neither"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, ""),
        ({"num_attention_heads": 12, "num_key_value_heads": 2}, ""),
    ],
)
def test_tokens_are_split_if_heads_are_and_layers_have_attention(changed: dict[str, Any], says: str, tmp_path: Path):
    size = 6
    (tmp_path / "config.json").write_text(json.dumps(load_architecture(load_run(QUICKSTART)) | changed))
    strategy = f"strategy_args={{strategy_name: fsdp2_train, ulysses_size: {size}}}"
    changes = [f"pretrain={tmp_path}", f"actor_train.{strategy}", f"actor_train.num_processes={size}"]
    issues = check_settings(validate_tree(compose_tree(QUICKSTART, changes)), cores=8)
    message = {issue.path: issue.message for issue in issues}.get("actor_train.strategy_args.ulysses_size", "")
    assert says in message
    assert bool(says) == bool(message)


@pytest.mark.parametrize("split", ["tp_size=2", "pp_size=2"])
def test_tokens_are_split_alone(split: str):
    table = "actor_train.strategy_args"
    changes = [f"{table}.strategy_name=fsdp2_train", f"{table}.ulysses_size=2", f"{table}.{split}"]
    with pytest.raises(ConfigError, match=f"{split.partition('=')[0]}=1"):
        validate_tree(compose_tree(QUICKSTART, changes))


def test_tokens_are_split_in_packed_attention_alone():
    changes = ["strategy_args={strategy_name: fsdp2_train, ulysses_size: 2}", "num_processes=2"]
    values = [f"actor_train.{change}" for change in (*changes, "model_args.attn_implementation=eager")]
    issues = check_settings(validate_tree(compose_tree(QUICKSTART, values)), cores=8)
    assert "ulysses_size" in {each.path: each.message for each in issues}["actor_train.model_args.attn_implementation"]


def test_deepspeed_has_no_stages():
    with pytest.raises(ConfigError, match="strategy_name=fsdp2_train"):
        validate_tree(compose_tree(QUICKSTART, ["actor_train.strategy_args.pp_size=2"]))


@pytest.mark.parametrize("key", ["tp_size", "pp_size", "ulysses_size"])
def test_a_policy_with_images_is_not_split(key: str):
    vision = load_run(CONFIGS / "frozen_lake_vision.yaml")
    strategy = vision.actor_train.strategy_args.model_copy(update={"strategy_name": "fsdp2_train", key: 2})
    train = vision.actor_train.model_copy(update={"num_processes": 2, "strategy_args": strategy})
    issues = check_settings(vision.model_copy(update={"actor_train": train}), cores=8)
    assert "image input" in {issue.path: issue.message for issue in issues}[f"actor_train.strategy_args.{key}"]


def test_adapters_of_experts_are_not_served_on_a_cpu(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(load_architecture(load_run(QUICKSTART)) | {"num_experts": 4}))
    common = ("actor_infer.strategy_args.strategy_name=vllm", "+actor_train.model_args.lora_target=all-linear")
    for rank, is_refused in (("null", False), ("16", True)):
        config = load_run(QUICKSTART, [*common, f"+{ENGINE}.max_lora_rank={rank}"])
        found = problems(pretrain=str(tmp_path), actor_infer=config.actor_infer, actor_train=config.actor_train)
        assert ("the model has 4 experts" in found.get(f"{ENGINE}.max_lora_rank", "")) == is_refused
