"""What vLLM does not compute of recurrent layers is found before the start, by the key that asks for it."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.config.checks.run import check_run
from offbeat.deploy.config.loader import compose_tree, validate_tree
from offbeat.trainer.config.aliases import ENGINE
from tests.families import write_family
from tests.paths import QUICKSTART

DTYPE = "actor_infer.model_args.dtype"
TARGET = "actor_train.model_args.lora_target"
STRATEGY = "actor_infer.strategy_args.strategy_name"
DIMS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
BFLOAT16 = f"+{DTYPE}=bfloat16"
ON_GPU = "actor_infer.device=cuda"


def problems(model: Path, *overrides: str, kind: str = "qwen3_5_text", **changes: Any) -> dict[str, str]:
    write_family(model, kind, vocab_size=128, **changes)
    tree = compose_tree(QUICKSTART, [f"{STRATEGY}=vllm", "actor_infer.device=cpu", f"pretrain={model}", *overrides])
    return {issue.path: issue.message for issue in check_run(validate_tree(tree), cores=2)}


@pytest.mark.parametrize(
    ("overrides", "changes", "path", "says"),
    [
        ([], DIMS, DTYPE, "in bfloat16 alone, not float32: take bfloat16"),
        ([BFLOAT16], DIMS | {"linear_key_head_dim": 64}, "pretrain", "equal ones of 64 or 128"),
        ([BFLOAT16], {"linear_key_head_dim": 32, "linear_value_head_dim": 32}, "pretrain", "linear_key_head_dim 32"),
        ([f"{STRATEGY}=hf_infer"], DIMS, STRATEGY, "has layers of linear_attention"),
        ([ON_GPU, "actor_infer.keep_sessions=true"], DIMS, "actor_infer.keep_sessions", "leave keep_sessions out"),
        (
            [BFLOAT16, f"+{TARGET}='q_proj,in_proj_z'", f"+{ENGINE}.max_lora_rank=16"],
            DIMS,
            TARGET,
            "without one of in_proj_qkv",
        ),
    ],
)
def test_what_an_engine_does_not_compute_is_refused(
    overrides: list[str], changes: dict[str, Any], path: str, says: str, tmp_path: Path
):
    assert says in problems(tmp_path, *overrides, **changes)[path]


@pytest.mark.parametrize(
    ("overrides", "kind", "changes"),
    [
        ([BFLOAT16], "qwen3_5_text", DIMS),
        ([ON_GPU], "qwen3_5_text", {}),
        ([], "lfm2", {}),
        ([BFLOAT16], "qwen3_next", DIMS),
        ([BFLOAT16, f"+{TARGET}='in_proj_qkv,in_proj_z'", f"+{ENGINE}.max_lora_rank=16"], "qwen3_5_text", DIMS),
    ],
)
def test_what_an_engine_computes_is_accepted(overrides: list[str], kind: str, changes: dict[str, Any], tmp_path: Path):
    found = problems(tmp_path, *overrides, kind=kind, **changes)
    assert not {DTYPE, STRATEGY, TARGET, "actor_infer.keep_sessions"} & found.keys(), found
