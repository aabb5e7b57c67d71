"""Each key of `dpo` and `distill` changes a batch's loss."""

from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.services.messages.types import Group
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.distillation import DistillConfig
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.config.preference import PreferenceConfig
from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_policy, read_vocab_size
from offbeat.trainer.training.data_step import DataTrainer
from offbeat.trainer.training.optimizer_step import StepModels
from tests.trainer.config.key_effects import Change
from tests.trainer.plain_engine import PlainEngine
from tests.trainer.trajectories import group, trajectory

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
PAIRS = [group(n, trajectory(0, [(3, 1 + n, 1.0)]), trajectory(1, [(3, 3 - n, 0.0)], base=1)) for n in range(3)]
ROWS = [group(n, trajectory(0, [(3, 2, float(n % 2))]), trajectory(1, [(3, 1 + n, 0.0)], base=n)) for n in range(3)]
CONVERSATIONS = [group(n, trajectory(0, [(2, 3, 0.0), (1, 1, 0.0)], base=n, versions=(0, 0))) for n in range(2)]
KTO = {"loss_type": "kto"}

OF_DPO: dict[str, list[Change]] = {
    "loss_type": [({"label_smoothing": 0.2}, {"loss_type": "robust"})]
    + [({}, {"loss_type": name}) for name in ("ipo", "hinge", "simpo", "orpo", "apo_zero", "apo_down", "kto")],
    "beta": [
        ({"loss_type": name}, {"beta": 0.7}) for name in ("sigmoid", "ipo", "hinge", "simpo", "orpo", "apo_zero", "kto")
    ],
    "label_smoothing": [({"loss_type": name}, {"label_smoothing": 0.2}) for name in ("sigmoid", "robust")],
    "reference_free": [
        ({"loss_type": name}, {"reference_free": True})
        for name in ("sigmoid", "ipo", "hinge", "robust", "apo_zero", "apo_down")
    ],
    "length_normalization": [
        ({"loss_type": name}, {"length_normalization": True}) for name in ("sigmoid", "hinge", "robust")
    ],
    "simpo_gamma": [({"loss_type": "simpo"}, {"simpo_gamma": 1.0})],
    "desirable_weight": [(KTO, {"desirable_weight": 2.0})],
    "undesirable_weight": [(KTO, {"undesirable_weight": 2.0})],
    "sft_coef": [
        ({"loss_type": name}, {"sft_coef": 0.5})
        for name in ("sigmoid", "ipo", "hinge", "robust", "simpo", "apo_zero", "apo_down")
    ],
}
OF_DISTILLATION: dict[str, list[Change]] = {
    "kd_objective": [
        ({}, {"kd_objective": name})
        for name in ("reverse_kl", "js_divergence", "adaptive_kl", "skewed_forward_kl", "skewed_reverse_kl")
    ],
    "distill_loss_weight": [({}, {"distill_loss_weight": 0.9})],
    "kd_temperature": [({}, {"kd_temperature": 2.0})],
    "teacher_temperature": [({}, {"teacher_temperature": 2.0})],
    "js_beta": [({"kd_objective": "js_divergence"}, {"js_beta": 0.2})],
    "adaptive_kl_alpha": [({"kd_objective": "adaptive_kl"}, {"adaptive_kl_alpha": 0.1})],
    "skew_lambda": [
        ({"kd_objective": name}, {"skew_lambda": 0.5}) for name in ("skewed_forward_kl", "skewed_reverse_kl")
    ],
    "logits_topk": [({"logits_topk": 0}, {"logits_topk": 3})],
    "add_tail": [({"logits_topk": 3}, {"add_tail": False})],
    "distill_on_prompt": [({}, {"distill_on_prompt": True})],
}
ELSEWHERE = {
    "precompute_ref_log_probs": "tests/integration/test_data_pipelines.py",
    "lmbda": "tests/services/rollout/data/test_sampled.py, tests/integration/test_distillation.py",
}
"""Other keys, and what shows them."""


def loss(folder: Path, pipeline: str, settings: dict[str, Any]) -> float:
    """Return the loss of a batch, with another model as reference or teacher."""
    tree: dict[str, Any] = {"pipeline": pipeline, pipeline: settings}
    other = FrozenModel(load_policy(folder, ModelArgs(), seed=2), ALONE)
    policy = PlainEngine(load_policy(folder, ModelArgs(), seed=1))
    groups: list[Group] = CONVERSATIONS
    if pipeline == "distill":
        tree["teacher"] = {"one": {"model_args": {"model_name_or_path": str(folder)}}}
        models = StepModels(policy, teachers=[other], vocab_size=read_vocab_size(folder))
    else:
        config = PreferenceConfig(**settings)
        groups = ROWS if config.loss_type == "kto" else PAIRS
        models = StepModels(policy, None, other if config.needs_reference else None)
    trainer = DataTrainer(LearnerConfig.model_validate(tree), models, ALONE)
    return trainer.evaluate(groups)["loss"].value


@pytest.mark.parametrize(
    ("pipeline", "base", "change"),
    [
        pytest.param(pipeline, base, change, id=f"{pipeline}.{key}-{n}")
        for pipeline, keys in (("dpo", OF_DPO), ("distill", OF_DISTILLATION))
        for key, changes in keys.items()
        for n, (base, change) in enumerate(changes)
    ],
)
def test_a_key_changes_the_loss(pipeline: str, base: dict[str, Any], change: dict[str, Any], folder: Path) -> None:
    before, after = loss(folder, pipeline, base), loss(folder, pipeline, base | change)
    assert after != pytest.approx(before, rel=1e-5)


def test_every_key_of_dpo_and_distill_has_an_effect_that_is_shown() -> None:
    assert {*PreferenceConfig.model_fields, *DistillConfig.model_fields} == {*OF_DPO, *OF_DISTILLATION, *ELSEWHERE}
