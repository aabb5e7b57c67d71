"""Defaults that depend on other tables."""

from typing import Any

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
