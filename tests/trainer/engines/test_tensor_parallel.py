"""Plans that can't be followed are refused. Splits: tests/integration/test_layouts.py and test_learner_engine.py."""

from pathlib import Path

import pytest

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.engines.tensor_parallel import find_unknown_style
from offbeat.trainer.models.loading import load_policy
from tests.families import write_family


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("qwen3", ""),
        ("qwen3_5_text", ""),
        ("qwen3_next", "qwen3_next needs moe_tp_experts, packed_colwise, which is not supported: take 1"),
        ("lfm2", "transformers has no plan for lfm2 (base_model_tp_plan): take 1"),  # but of its output embedding
        ("nemotron_h", "transformers has no plan for nemotron_h (base_model_tp_plan): take 1"),
    ],
)
def test_plans_that_can_not_be_followed_are_refused(family: str, says: str, tmp_path: Path) -> None:
    write_family(tmp_path, family)
    plan = dict(load_policy(tmp_path, ModelArgs(), seed=0).model.tp_plan or {})
    assert find_unknown_style(family, plan) == says
