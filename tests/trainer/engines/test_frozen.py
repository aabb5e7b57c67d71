"""A reference that follows the policy."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.roles import TrainDtype
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.tiny import write_tiny_policy

DTYPES: tuple[TrainDtype, ...] = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frozen")
    write_tiny_policy(path, TinyPolicyConfig(num_hidden_layers=1), [f"w{i}" for i in range(20)])
    return path


def reference(folder: Path, dtype: TrainDtype) -> FrozenModel:
    return FrozenModel(load_policy(folder, ModelArgs(dtype=dtype), 1), Ranks(0, 0, 1, torch.device("cpu")))


def copies(model: FrozenModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.tensors()}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return sum(float((a[name].double() - b[name].double()).square().sum()) for name in a) ** 0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reference_reaches_a_policy_by_small_shares(folder: Path, dtype: TrainDtype) -> None:
    model = reference(folder, dtype)
    start = copies(model)
    policy = {name: (1.01 * tensor.float()).to(tensor.dtype) for name, tensor in start.items()}
    for syncs in range(1, 41):
        model.follow(policy.items(), 0.1)
        left = distance(copies(model), policy) / distance(start, policy)
        assert left == pytest.approx(0.9**syncs, rel=1e-2)
    used = dict(model._model.model.named_parameters())
    assert distance(used, policy) / distance(start, policy) < 0.3, "rounded"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_resumed_reference_goes_the_same_way(folder: Path, dtype: TrainDtype) -> None:
    model, resumed = reference(folder, dtype), reference(folder, dtype)
    policy = {name: (1.01 * tensor.float()).to(tensor.dtype) for name, tensor in model.tensors()}
    for _ in range(3):
        model.follow(policy.items(), 0.1)
    resumed.follow(copies(model).items(), 1.0)
    for each in (model, resumed):
        each.follow(policy.items(), 0.1)
    assert distance(copies(model), copies(resumed)) == 0
    assert distance(dict(model._model.model.named_parameters()), dict(resumed._model.model.named_parameters())) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_whole_share_is_the_policy_itself(folder: Path, dtype: TrainDtype) -> None:
    model = reference(folder, dtype)
    policy = {name: (1.01 * tensor.float()).to(tensor.dtype) for name, tensor in model.tensors()}
    model.follow(policy.items(), 1.0)
    assert {name: tensor.dtype for name, tensor in model.tensors()} == {name: t.dtype for name, t in policy.items()}
    assert distance(copies(model), policy) == 0
