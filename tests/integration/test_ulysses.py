"""Ranks that divide the tokens of each pass learn what one process learns."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.engines.sequence_parallel import split_tokens
from offbeat.trainer.models.loading import load_policy
from tests.families import MULTIMODAL, write_family, write_multimodal
from tests.integration.rank_processes import run_ranks
from tests.integration.ulysses_rank import CHANGES, INPUTS, MODELS, SIZE, critic_learned, policy_learned

pytestmark = pytest.mark.timeout(600)  # four ranks beside the tests of the mesh, on two cores


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in MODELS:
        (folder / family).mkdir()
        write = write_multimodal if family in MULTIMODAL else write_family
        write(folder / family, family, **CHANGES.get(family, {}))  # four heads, two of keys and values
    return folder


@pytest.fixture(scope="module")
def out(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ranks wrote."""
    folder = tmp_path_factory.mktemp("out")
    run_ranks("ulysses_rank.py", SIZE, models, folder)
    return folder


def assert_same(alone: dict[str, Tensor], split: dict[str, Tensor]) -> None:
    assert alone.keys() == split.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(tensor, split[name], rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("model", MODELS)
def test_ranks_learn_what_one_process_learns(model: str, models: Path, out: Path, ranks: Ranks):
    assert_same(policy_learned(models / model, "plain", ranks, 1), load_file(out / f"{model}-plain.safetensors"))


@pytest.mark.parametrize("inputs", [name for name in INPUTS if name != "plain"])
def test_all_that_a_pass_computes_is_divided(inputs: str, models: Path, out: Path, ranks: Ranks):
    alone = policy_learned(models / "qwen3", inputs, ranks, 1)
    assert_same(alone, load_file(out / f"qwen3-{inputs}.safetensors"))


def test_a_critic_gives_the_values_of_one_process(models: Path, out: Path, ranks: Ranks):
    alone = critic_learned(models / "qwen3", ranks, 1)
    assert float(alone["values"].abs().min()) > 1e-3
    assert_same(alone, load_file(out / "qwen3-critic.safetensors"))


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("gemma2", "attention of eager"),
        ("falcon_h1", "recurrent layers of falcon_h1"),
        ("gpt2", "num_attention_heads, 4"),
    ],
)
def test_models_that_are_not_split(family: str, says: str, tmp_path: Path):
    write_family(tmp_path, family)
    alone = Ranks(0, 0, 1, torch.device("cpu"), ulysses_size=8 if family == "gpt2" else 2)
    with pytest.raises(ValueError, match=f"ulysses_size .*{says}"):
        split_tokens(load_policy(tmp_path, ModelArgs(), seed=1), alone)
