"""Two ranks train a policy with image input as one does, although their passes differ in whether they have images."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offbeat.trainer.engines.process_group import Ranks
from tests.families import VISION_FAMILIES, write_vision_policy
from tests.integration.rank_processes import run_ranks
from tests.integration.vision_rank import ENGINES, learned

pytestmark = pytest.mark.timeout(600)
FAMILIES = [
    pytest.param(family, marks=pytest.mark.nightly if family == "qwen3_5_moe" else ()) for family in VISION_FAMILIES
]
"""The experts of Qwen3.5's mixtures train as those of Qwen3-VL's."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    write_vision_policy(folder, request.param, list("abcdef"))
    return folder


@pytest.fixture(scope="module")
def out(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks wrote."""
    out = tmp_path_factory.mktemp("out")
    run_ranks("vision_rank.py", 2, folder, out)
    return out


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_learn_what_one_learns(engine: str, folder: Path, out: Path, ranks: Ranks) -> None:
    alone, together = learned(folder, engine, ranks), load_file(out / f"{engine}.safetensors")
    assert alone.keys() == together.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(tensor, together[name], rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
