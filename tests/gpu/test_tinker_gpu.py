"""Tinker's API with learner and vLLM on one GPU."""

from pathlib import Path

import pytest
import torch

tinker = pytest.importorskip("tinker")

from offbeat.benchmarks.tinker.server import running_server  # noqa: E402
from tests.integration.tinker_client import check_learning, check_samplers  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]

SETTINGS = (
    *("actor_train.device=cuda", "actor_infer.device=cuda"),
    "actor_infer.strategy_args.strategy_config.gpu_memory_utilization=0.05",
    f"actor_infer.strategy_args.strategy_config.kv_cache_memory_bytes={1 << 30}",
)
"""Of the GPU's memory, what several tests can share."""
TOLERANCE = 5e-2
"""The engine samples in bfloat16, the learner computes in float32."""


def test_models_learn_and_are_sampled(tmp_path: Path) -> None:
    with running_server(tmp_path / "run", *SETTINGS) as server:
        with tinker.ServiceClient(base_url=server.url, api_key="tml-me") as service:
            check_learning(service, TOLERANCE)
            check_samplers(service)
        assert server.stop() == 0
