"""What `megatron_train` can't do is found before the start, by the key that asks for it."""

import json
import re
import sys
from pathlib import Path

import pytest

from offbeat.deploy.config.checks.run import check_settings
from offbeat.deploy.config.errors import ConfigError
from offbeat.deploy.config.loader import compose_tree, load_run, validate_tree
from offbeat.deploy.run_setup import load_architecture
from offbeat.trainer.config.megatron_model import find_megatron_obstacle
from tests.paths import CONFIGS, QUICKSTART

STRATEGY = "actor_train.strategy_args.strategy_name"
ARGS = "actor_train.model_args"
QWEN2 = load_architecture(load_run(QUICKSTART))


def problems(*overrides: str, file: Path = QUICKSTART) -> dict[str, str]:
    config = validate_tree(compose_tree(file, [f"{STRATEGY}=megatron_train", *overrides]))
    return {issue.path: issue.message for issue in check_settings(config, cores=8)}


def test_the_quickstart_trains_with_it() -> None:
    assert problems() == {}
    assert (
        problems(f"{ARGS}.shared_prefix=true", "use_kl_loss=true", "kl_loss_coef=0.1", "ref_model_sync_steps=2") == {}
    )


@pytest.mark.parametrize(
    ("overrides", "path", "advice"),
    [
        (("actor_train.num_processes=2",), "actor_train.num_processes", "take 1, or fsdp2_train"),
        ((f"{ARGS}.dtype=bfloat16",), f"{ARGS}.dtype", "take float32, or fsdp2_train"),
        ((f"{ARGS}.lora_target=all-linear",), f"{ARGS}.lora_target", "take deepspeed_train"),
        (
            (f"{ARGS}.disable_gradient_checkpointing=false",),
            f"{ARGS}.disable_gradient_checkpointing",
            "take true, or fsdp2_train",
        ),
        ((f"{ARGS}.attn_implementation=eager",), f"{ARGS}.attn_implementation", "take auto, or fsdp2_train"),
        (("adv_estimator=gae",), "adv_estimator", "or deepspeed_train"),
    ],
)
def test_what_it_does_not_train_is_refused(overrides: tuple[str, ...], path: str, advice: str) -> None:
    message = problems(*overrides)[path]
    assert message.startswith("not with megatron_train, as ")
    assert advice in message


def test_a_reward_model_is_refused() -> None:
    assert "take deepspeed_train" in problems(file=CONFIGS / "reward_model.yaml")["pipeline"]


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("tp_size=2", "strategy_name=fsdp2_train"),
        ("pp_size=2", "strategy_name=fsdp2_train"),
        ("zero_stage=1", "strategy_name=deepspeed_train"),
        ("strategy_config.tensor_model_parallel_size=2", "strategy_name=fsdp2_train"),
        ("strategy_config.expert_model_parallel_size=2", "tp_size and pp_size of fsdp2_train"),
    ],
)
def test_splits_are_refused(override: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        problems(f"+actor_train.strategy_args.{override}")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
    assert problems() == {STRATEGY: "megatron_train needs megatron-core: pip install 'offbeat[megatron]'"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gemma3"}, "trains llama, qwen2, qwen3, qwen2_moe, qwen3_moe, and the model is gemma3"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 1, "norm_topk_prob": True}, "num_experts_per_tok is 1"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias is true"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is yarn"),
    ],
)
def test_models_that_differ_from_megatrons_are_refused(changes: dict[str, object], says: str) -> None:
    assert find_megatron_obstacle(QWEN2) == ""
    assert re.search(says, find_megatron_obstacle(QWEN2 | changes))


def test_a_folder_with_another_model_is_refused(tmp_path: Path) -> None:
    config = load_run(QUICKSTART, [f"{STRATEGY}=megatron_train"])
    (tmp_path / "config.json").write_text(json.dumps(QWEN2 | {"model_type": "gemma3"}))
    issues = check_settings(config.model_copy(update={"pretrain": str(tmp_path)}), cores=8)
    message = {issue.path: issue.message for issue in issues}[STRATEGY]
    assert message.startswith("megatron_train: it trains llama, qwen2")
    assert message.endswith("take deepspeed_train")
