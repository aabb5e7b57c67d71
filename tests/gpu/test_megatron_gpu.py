"""Megatron's model learns on a GPU what it learns on a CPU: `pytest tests/gpu/test_megatron_gpu.py`."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from offbeat.trainer.engines.process_group import process_group, ranks_of_environment
from tests.integration.learner_rank import fixed_batch
from tests.trainer.engines.comparing import assert_same, nll, weights_of
from tests.trainer.engines.test_megatron import HYPER, MODELS, engine, write_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def learned(folder: Path, device: str) -> dict[str, Tensor]:
    with process_group(ranks_of_environment(device)) as ranks:
        policy = engine(folder, ranks)
        for _ in range(3):
            assert policy.train(fixed_batch(), nll, HYPER).applied
        policy.offload_states()
        policy.load_states()
        policy.save(folder / "state")
        policy.load(folder / "state")
        policy.train(fixed_batch(), nll, HYPER)
        return {name: weight.cpu() for name, weight in weights_of(policy).items()}


@pytest.mark.parametrize("model_type", MODELS)
def test_a_gpu_learns_what_a_cpu_learns(tmp_path: Path, model_type: str) -> None:
    write_model(tmp_path, model_type)
    (tmp_path / "state").mkdir()
    assert_same(learned(tmp_path, "cuda"), learned(tmp_path, "cpu"), atol=1e-3)
