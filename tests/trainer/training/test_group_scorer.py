"""Frozen models score group by group, so a score is the same in any process and beside any other groups."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.services.messages.types import Group
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.learner import LearnerConfig
from offbeat.trainer.data.batch import pack
from offbeat.trainer.data.group_codec import pack_group, unpack_group
from offbeat.trainer.engines.frozen import FirstPolicyReference, FrozenModel
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.training.group_scorer import GroupScorer, decode_scores, encode_scores
from offbeat.trainer.training.optimizer_step import BatchTrainer, StepModels
from tests.copying import replace
from tests.fakes import make_group, train_on
from tests.trainer.plain_engine import PlainEngine

ALONE = Ranks(0, 0, 1, torch.device("cpu"))
GROUPS = [
    replace(make_group(0, rewards=(0.0, 1.0, 1.0, 0.5)), temperature=0.7),
    make_group(1, rewards=(1.0, 0.0, 0.0, 0.5)),
    make_group(2, rewards=(0.0, 1.0)),
]
GROUPS[2] = replace(GROUPS[2], tag="other", trajectories=tuple(replace(t, tag="other") for t in GROUPS[2].trajectories))
KEYS = {"reference": "reference@1", "teacher.all": "teacher.all@1", "teacher.one": "teacher.one@1"}


def config(folder: Path, **tree: Any) -> LearnerConfig:
    teacher = {"model_args": {"model_name_or_path": str(folder)}}
    settings: dict[str, Any] = {
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "use_opd": True,
        "teacher": {"all": teacher, "one": teacher | {"tag_included": ("tag",)}},
        "actor_train": {"training_args": {"learning_rate": 1e-2, "max_tokens_per_microbatch": 24}},
    }
    return LearnerConfig.model_validate(settings | tree)


def model(folder: Path, seed: int) -> FrozenModel:
    return FrozenModel(load_policy(folder, ModelArgs(), seed), ALONE)


def train(folder: Path, models: Mapping[str, Any], groups: list[Group]) -> Tensor:
    policy = PlainEngine(load_policy(folder, ModelArgs(), seed=1))
    train_on(BatchTrainer(config(folder), StepModels(policy, **models), ALONE), groups, 0)
    return torch.cat([tensor.flatten() for _, tensor in policy.tensors()])


@pytest.mark.parametrize("shared_prefix", [False, True])
def test_a_group_scores_the_same_alone_and_beside_others(folder: Path, shared_prefix: bool):
    model_args: dict[str, Any] = {"shared_prefix": shared_prefix}
    settings = config(
        folder, actor_train={"model_args": model_args, "training_args": {"max_tokens_per_microbatch": 24}}
    )
    scorer = GroupScorer(FrozenModel(load_policy(folder, ModelArgs(**model_args), 2), ALONE), settings, None)
    together = scorer.score(GROUPS)
    for group, scores in zip(GROUPS, together, strict=True):
        assert torch.equal(scores, scorer.score([group])[0])
        assert len(scores) == pack([group]).num_sampled


def test_a_step_on_a_services_scores_equals_one_with_the_models_bit_for_bit(folder: Path):
    models = {"reference": model(folder, 2), "teachers": [model(folder, 3), model(folder, 4)]}
    inside = train(folder, models, GROUPS)
    roles = zip(KEYS.values(), (2, 3, 4), strict=True)
    scorers = {key: GroupScorer(model(folder, seed), config(folder), None) for key, seed in roles}
    scored = [
        replace(group, scores={key: encode_scores(scorer.score([group])[0]) for key, scorer in scorers.items()})
        for group in GROUPS
    ]
    travelled = [unpack_group(pack_group(group)) for group in scored]
    beside = train(folder, {"teachers": [None, None], "score_keys": KEYS}, travelled)
    assert torch.equal(inside, beside)
    others = train(folder, models | {"reference": model(folder, 5)}, GROUPS)
    assert not torch.equal(inside, others), "the reference has no effect here"


def test_a_service_scores_as_the_policy_without_its_adapters(folder: Path):
    """With LoRA the learner's reference is the policy, a service's the base model."""
    policy = load_policy(folder, ModelArgs(lora_target="all-linear"), 1)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    inside = GroupScorer(FirstPolicyReference(PlainEngine(policy), policy), config(folder), None).score(GROUPS)
    beside = GroupScorer(model(folder, 1), config(folder), None).score(GROUPS)
    assert all(torch.equal(a, b) for a, b in zip(inside, beside, strict=True))
    adapted = GroupScorer(PlainEngine(policy), config(folder), None).score(GROUPS)
    assert not torch.equal(adapted[0], beside[0])


@pytest.mark.parametrize("scores", [{}, {"reference@1": bytes(8)}, {"reference@2": bytes(4 * 16)}])
def test_a_missing_short_or_other_models_score_is_an_error(scores: dict[str, bytes]):
    group = replace(GROUPS[0], scores=scores)
    with pytest.raises(ValueError, match="needs 16 scores of reference@1"):
        decode_scores(group, "reference@1")


def test_a_group_of_an_earlier_build_has_no_scores():
    *earlier, scores = pack_group(GROUPS[0])
    assert scores == {}
    assert unpack_group(earlier).scores == {}
