"""Defaults that follow from keys of other tables."""

from typing import Any

import pytest

from offbeat.deploy.config.loader import validate_tree


def old_logprobs(**tables: Any) -> str:
    return validate_tree({"custom_envs": {}, **tables}).old_logprobs


def sampling(**args: Any) -> dict[str, Any]:
    return {"generating_args": args}


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({}, "behavior"),
        ({"actor_infer": sampling(top_p=0.9)}, "recompute"),
        ({"train_env_manager": sampling(top_k=100)}, "recompute"),
        ({"actor_infer": sampling(top_p=0.9), "pipeline": "rlvr"}, "recompute"),
        ({"actor_infer": sampling(top_p=0.9), "pipeline": "online_dpo"}, "behavior"),
        ({"actor_infer": sampling(top_k=100), "train_env_manager": sampling(top_k=100)}, "recompute"),
        ({"val_env_manager": sampling(top_p=0.9)}, "behavior"),
        ({"actor_infer": sampling(top_p=0.9), "old_logprobs": "behavior"}, "behavior"),
        ({"actor_infer": sampling(top_p=0.9), "pg_variant": "aipo"}, "behavior"),
        ({"actor_infer": sampling(top_p=1.0, top_k=-1)}, "behavior"),
    ],
)
def test_logprobs_of_a_cut_distribution_are_recomputed(tables: dict[str, Any], expected: str):
    assert old_logprobs(**tables) == expected
