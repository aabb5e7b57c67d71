from pathlib import Path

import pytest

from offbeat.trainer.config.actor_train import ModelArgs, TrainingArgs
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.engines.base import Hyperparameters
from offbeat.trainer.engines.param_groups import GroupKind, adopt, parameter_groups
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.policy import PackedPolicy
from offbeat.trainer.models.tiny import write_tiny_policy


@pytest.fixture
def policy(tmp_path: Path) -> PackedPolicy:
    write_tiny_policy(tmp_path, TinyPolicyConfig(num_hidden_layers=1), ["a", "b"])
    return load_policy(tmp_path, ModelArgs(), seed=1, value_head=True)


def test_norms_biases_and_embeddings_do_not_decay(policy: PackedPolicy):
    names = {id(parameter): name.split(".", 1)[1] for name, parameter in policy.named_parameters()}
    groups = parameter_groups(policy, TrainingArgs(weight_decay=0.1))
    assert list(groups) == [
        GroupKind(False, True),
        GroupKind(False, False),
        GroupKind(True, True),
        GroupKind(True, False),
    ]
    matrices, exempt, *head = ([names[id(p)] for p in group] for group in groups.values())
    assert all(name.endswith("proj.weight") for name in matrices)
    assert len(matrices) == 7
    assert {name.split(".")[-1] if "norm" not in name else "norm" for name in exempt} == {"weight", "bias", "norm"}
    assert [name for name in exempt if name.endswith("weight") and "norm" not in name] == ["model.embed_tokens.weight"]
    assert head == [["weight"], ["bias"]]
    assert sum(map(len, groups.values())) == len(names)


@pytest.mark.parametrize("training", [TrainingArgs(), TrainingArgs(weight_decay=0.1, decay_all_weights=True)])
def test_otherwise_there_is_one_group_of_the_model(policy: PackedPolicy, training: TrainingArgs):
    assert list(parameter_groups(policy, training)) == [GroupKind(False, True), GroupKind(True, True)]


def test_adapters_decay(tmp_path: Path):
    write_tiny_policy(tmp_path, TinyPolicyConfig(num_hidden_layers=1), ["a", "b"])
    adapted = load_policy(tmp_path, ModelArgs(lora_target="q_proj"), seed=1)
    groups = parameter_groups(adapted, TrainingArgs(weight_decay=0.1))
    assert {kind: len(group) for kind, group in groups.items()} == {GroupKind(False, True): 2}


def test_rates_and_decay_follow_the_kind_of_a_group(policy: PackedPolicy):
    kinds = tuple(parameter_groups(policy, TrainingArgs(weight_decay=0.1)))
    groups: list[dict[str, float]] = [{} for _ in kinds]
    adopt(groups, kinds, Hyperparameters(1e-3, 0.1, head_learning_rate=1e-2))
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(1e-3, 0.1), (1e-3, 0.0), (1e-2, 0.1), (1e-2, 0.0)]
    adopt(groups, kinds, Hyperparameters(1e-3, 0.1, head_learning_rate=1e-2, head_alone=True))
    assert [g["lr"] for g in groups] == [0.0, 0.0, 1e-2, 1e-2]
