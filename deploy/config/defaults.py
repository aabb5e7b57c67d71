"""Defaults that depend on other tables."""

from pathlib import Path
from typing import Any

from offbeat.envs.prompts import IMAGE
from offbeat.trainer.config.adapter_files import AdapterError, read_adapter
from offbeat.trainer.config.aliases import find_keys
from offbeat.trainer.config.estimators import AGAINST_BEHAVIOR, WITHOUT_RATIO

Tree = dict[str, Any]
SAMPLING = ("actor_infer.generating_args", "train_env_manager.generating_args")
"""Of training episodes; a key in both has the same value."""


def recompute_cut_logprobs(tree: Tree) -> Tree:
    """Set `old_logprobs: recompute`, unless given, if `top_p` or `top_k` truncate the engine's distribution."""
    plays = tree.get("pipeline", "agentic") in ("agentic", "rlvr")
    if "old_logprobs" in tree or not plays or tree.get("pg_variant") in (*AGAINST_BEHAVIOR, *WITHOUT_RATIO):
        return tree
    args: Tree = {}
    for pattern in SAMPLING:
        for path, table in find_keys(tree, pattern):
            given = table[path[-1]]
            args |= {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    top_p, top_k = args.get("top_p"), args.get("top_k")
    is_cut = (isinstance(top_p, float) and top_p < 1) or (isinstance(top_k, int) and top_k > 0)
    return {**tree, "old_logprobs": "recompute"} if is_cut else tree


def read_shown_images(tree: Tree) -> Tree:
    """Set `image_input`, unless given, if an env shows images."""
    templates = [table[path[-1]] for path, table in find_keys(tree, "custom_envs.*.agent_template")]
    if not any(isinstance(template, str) and IMAGE in template for template in templates):
        return tree
    train = tree.get("actor_train", {})
    args = train.get("model_args", {}) if isinstance(train, dict) else None
    if not isinstance(args, dict) or args.get("image_input") is not None:
        return tree
    return {**tree, "actor_train": {**train, "model_args": {**args, "image_input": True}}}


def follow_adapter(tree: Tree) -> Tree:
    """Set the `lora_*` keys that are left out beside an adapter's folder; one that can't be read has its own issue."""
    train = tree.get("actor_train")
    args = train.get("model_args") if isinstance(train, dict) else None
    name = args.get("adapter_name_or_path") if isinstance(args, dict) else None
    if not isinstance(train, dict) or not isinstance(args, dict) or not isinstance(name, str):
        return tree
    try:
        files = read_adapter(Path(name))
    except AdapterError:
        return tree
    implied = {"lora_target": ",".join(files.targets), **files.scale_keys}
    given = {key: value for key, value in args.items() if key not in implied or value is not None}
    return {**tree, "actor_train": {**train, "model_args": {**implied, **given}}}
