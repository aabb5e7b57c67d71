"""Keys that a pipeline refuses are never advised in its runs."""

import pytest

from offbeat.trainer.config.pipeline_keys import keys_without_effect
from offbeat.trainer.config.run import LearnerRunConfig


@pytest.mark.parametrize(
    ("pipeline", "refused", "used"),
    [
        ("agentic", set(), {"entropy_loss_coef"}),
        ("online_dpo", {"entropy_loss_coef", "train_infer_correction"}, {"zero_variance"}),
        ("sft", {"difficulty_mask", "reward_normalization", "warm_start"}, {"sequence_length", "data"}),
        ("distill", {"zero_variance"}, {"teacher"}),
    ],
)
def test_a_diagnosis_knows_the_keys_that_the_pipeline_refuses(pipeline: str, refused: set[str], used: set[str]):
    config = LearnerRunConfig.model_validate({"pipeline": pipeline})
    assert config.limits.without_effect == frozenset(keys_without_effect(config))
    assert config.limits.without_effect >= refused
    assert not config.limits.without_effect & used
    assert config.limits.trains_by_admission == config.reads_data
