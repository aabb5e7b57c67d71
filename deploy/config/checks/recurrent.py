"""Checks of vLLM's engines for models with recurrent layers."""

from collections.abc import Iterator, Mapping
from typing import Any

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.vocabulary import MissingWordsError
from offbeat.deploy.run_setup import load_architecture
from offbeat.services.generation.kv_cache import RECURRENT, layer_kinds, text_config
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.config.issue import ConfigIssue

DTYPE = "actor_infer.model_args.dtype"
HEAD_DIMS = (64, 128)
"""Of the gated delta rule in vLLM on a CPU."""


def check_recurrent(config: RunConfig) -> Iterator[ConfigIssue]:
    infer = config.actor_infer
    if not config.uses_engine or infer.strategy_args.strategy_name != "vllm" or config.pretrain == "tiny":
        return
    try:
        architecture = load_architecture(config)
    except (OSError, ValueError, MissingWordsError):
        return  # an unreadable model has its own error
    if not RECURRENT & set(layer_kinds(architecture)):
        return
    if infer.device == "cuda" and infer.keep_sessions:
        yield ConfigIssue(
            "actor_infer.keep_sessions",
            "on GPUs vLLM reads a turn's last token ahead, and the model's recurrent layers can't take it back: leave "
            "keep_sessions out",
        )
    text = text_config(architecture)
    if infer.device == "cpu" and "linear_value_head_dim" in text:
        yield from _check_gated_delta(config, text)
    yield from _check_adapter(config)


def _check_gated_delta(config: RunConfig, text: Mapping[str, Any]) -> Iterator[ConfigIssue]:
    dtype = config.actor_infer.model_args.dtype or config.actor_train.model_args.dtype
    if dtype != "bfloat16":
        yield ConfigIssue(
            DTYPE,
            f"vLLM on a CPU computes the model's recurrent layers in bfloat16 alone, not {dtype}: take bfloat16",
            "bfloat16",
        )
    dims = [text.get(f"linear_{part}_head_dim", 128) for part in ("key", "value")]
    if dims[0] != dims[1] or dims[0] not in HEAD_DIMS:
        yield ConfigIssue(
            "pretrain",
            f"{config.pretrain} has linear_key_head_dim {dims[0]} and linear_value_head_dim {dims[1]}: vLLM on a CPU "
            f"computes equal ones of {' or '.join(map(str, HEAD_DIMS))}",
        )


def _check_adapter(config: RunConfig) -> Iterator[ConfigIssue]:
    targets = config.actor_train.model_args.lora_targets
    if config.actor_infer.engine.max_lora_rank is None or isinstance(targets, str):
        return
    if "in_proj_z" in targets and "in_proj_qkv" not in targets:
        yield ConfigIssue(
            "actor_train.model_args.lora_target",
            f"vLLM serves no adapter of in_proj_z without one of in_proj_qkv: add it, or unset {ENGINE}.max_lora_rank",
        )
