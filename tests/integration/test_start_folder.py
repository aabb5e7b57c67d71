"""Weights after the warm start, which are a reference's, in checkpoints."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offbeat.trainer.engines.frozen import FrozenModel
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.training.policy_trainer import PolicyTrainer
from tests.integration.test_learner_policy_trainer import REFERENCE, assert_equal, begun, run_of


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    with process_group(alone := ranks_of_environment("cpu")):
        yield alone


@pytest.mark.parametrize("placement", ["learner", "service"])
def test_a_checkpoint_alone_has_its_reference(tmp_path: Path, ranks: Ranks, placement: str) -> None:
    """A checkpoint from a store, once the run's folder is lost."""
    overrides = (*REFERENCE, f"reference.strategy_args.placement={placement}")
    first = run_of(tmp_path / "first", overrides)
    folder = first.checkpoints / "step-000001"
    folder.mkdir(parents=True)
    begun(first, ranks).save(folder)
    assert (folder / "state" / "start" / "model.safetensors").samefile(first.output_dir / "start" / "model.safetensors")
    expected = load_file(folder / "state" / "start" / "model.safetensors")
    restored = tmp_path / "second" / "restored" / "step-000001"
    shutil.copytree(folder, restored)
    shutil.rmtree(first.output_dir)
    again = PolicyTrainer(run_of(tmp_path / "second", overrides), ranks)
    assert again.load(restored, 0.1)
    assert_equal(load_file(tmp_path / "second" / "start" / "model.safetensors"), expected)
    if placement == "learner":
        assert isinstance(again._reference, FrozenModel)
        assert_equal(dict(again._reference.tensors()), expected)
