"""A critic on a GPU of its own trains as within the learner's process."""

from pathlib import Path

import pytest
import torch

from offbeat.trainer.engines.node_ranks import NodeRanks
from tests.integration.critic_rank import learned, run_world

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
FSDP2 = "actor_train.strategy_args.strategy_name=fsdp2_train"


@pytest.mark.parametrize("strategy", ["actor_train.strategy_args.zero_stage=2", FSDP2])
def test_a_critic_on_the_second_gpu_trains_as_on_the_first(strategy: str, tmp_path: Path) -> None:
    for name, nodes in (("within", NodeRanks(1)), ("own", NodeRanks(1, 1))):
        run_world(tmp_path / name, "cuda", nodes, (strategy,))
    (weights, reported), (expected, expected_gauges) = learned(tmp_path / "own"), learned(tmp_path / "within")
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    for one, other in zip(reported, expected_gauges, strict=True):
        assert one == pytest.approx(other, rel=1e-2, abs=1e-3)
    assert "critic/loss" in reported[-1]
