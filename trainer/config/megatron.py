"""Megatron's settings of ROLL's training strategies."""

from collections.abc import Mapping
from typing import Any, cast

from offbeat.trainer.config.issue import ConfigIssue

Tree = dict[str, Any]

TABLE = "actor_train.strategy_args.strategy_config"
RECOMPUTATION: Mapping[object, bool | None] = {"full": False, None: None}
"""Megatron's `recompute_granularity` -> `disable_gradient_checkpointing`, or None for any."""


def translate_megatron(tree: Tree) -> list[ConfigIssue]:
    """Move the settings with a key of our own to it; return contradictions and settings without one."""
    train = tree.get("actor_train")
    strategy = cast(Tree, train).get("strategy_args") if isinstance(train, dict) else None
    config = cast(Tree, strategy).get("strategy_config") if isinstance(strategy, dict) else None
    if not isinstance(config, dict):
        return []
    train, strategy, config = cast(Tree, train), cast(Tree, strategy), cast(Tree, config)
    issues = list[ConfigIssue]()
    if "recompute_granularity" in config:
        value = config.pop("recompute_granularity")
        if value not in RECOMPUTATION:
            issues.append(
                _issue("recompute_granularity", "take full, or model_args.disable_gradient_checkpointing alone")
            )
        elif (disabled := RECOMPUTATION[value]) is not None:
            args = train.setdefault("model_args", {})
            if isinstance(args, dict) and cast(Tree, args).setdefault("disable_gradient_checkpointing", disabled):
                message = f"{value} contradicts model_args.disable_gradient_checkpointing: set that alone"
                issues.append(_issue("recompute_granularity", message))
    if "use_distributed_optimizer" in config:
        shards = config.pop("use_distributed_optimizer")
        name = strategy.get("strategy_name")
        if name != "megatron_train":  # whose one process has nothing to shard
            is_sharded = name == "fsdp2_train" or bool(strategy.setdefault("zero_stage", int(shards is True)))
            if shards is not is_sharded:
                message = "contradicts strategy_args.zero_stage, or fsdp2_train, which shards: leave this out"
                issues.append(_issue("use_distributed_optimizer", message))
    return issues


def _issue(key: str, message: str) -> ConfigIssue:
    return ConfigIssue(f"{TABLE}.{key}", message)
