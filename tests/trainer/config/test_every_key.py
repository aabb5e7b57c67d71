"""No key of an algorithm is silent: each changes what is trained."""

from typing import Any

import pytest
import torch

from offbeat.trainer.config.algorithm import AlgorithmConfig
from offbeat.trainer.config.corrections import ImportanceWeight, MismatchFilter, TrainInferCorrection
from offbeat.trainer.config.rewards import RewardNormalization, RewardShaping
from offbeat.trainer.config.roles import TeacherConfig
from tests.trainer.config.key_effects import (
    EFFECTS,
    IN_THE_STEP,
    NESTED,
    OF_THE_ENGINE,
)
from tests.trainer.outcome import outcome

CASES = [
    pytest.param(base, change, id=f"{key}-{n}")
    for key, changes in (EFFECTS | NESTED).items()
    for n, (base, change) in enumerate(changes)
]


@pytest.mark.parametrize(("base", "change"), CASES)
def test_a_key_changes_what_is_trained(base: dict[str, Any], change: dict[str, Any]):
    before, after = outcome(AlgorithmConfig(**base)), outcome(AlgorithmConfig(**base | change))
    one, two = before.numbers(), after.numbers()
    assert torch.isfinite(two).all()
    assert one.shape != two.shape or not torch.allclose(one, two, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("base", "change"), CASES)
def test_a_configuration_that_was_written_out_in_full_is_read_again(base: dict[str, Any], change: dict[str, Any]):
    config = AlgorithmConfig(**base | change)
    assert AlgorithmConfig.model_validate_json(config.model_dump_json()) == config


def test_every_key_has_an_effect_that_is_shown():
    keys = set(AlgorithmConfig.model_fields)
    nested_teacher = {f"TeacherConfig.{name}" for name in TeacherConfig.model_fields if name not in OF_THE_ENGINE}
    tables = {"reward_normalization", "reward_shaping", "train_infer_correction"}
    assert keys == set(EFFECTS) | IN_THE_STEP | tables
    nested = {
        f"{table.__name__}.{name}"
        for table in (RewardNormalization, RewardShaping, TrainInferCorrection, ImportanceWeight, MismatchFilter)
        for name in table.model_fields
    }
    assert nested | nested_teacher == set(NESTED)
