"""Two learner processes, which meet through Redis, learn what one learns, with algorithms that look at whole sequences,
turns and batches."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import write_tiny_policy
from offbeat.trainer.process.remote_ranks import FollowerHost
from tests.forked import ForkedProcess
from tests.integration.algorithm_rank import ALGORITHMS
from tests.integration.rank_processes import run_ranks
from tests.integration.rendezvous_rank import RUN
from tests.paths import ROOT

HERE = Path(__file__).parent
pytestmark = pytest.mark.timeout(600)


def test_two_processes_learn_what_one_learns(redis_url: str, tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    model.mkdir()
    out.mkdir()
    write_tiny_policy(model, TinyPolicyConfig(num_hidden_layers=1), ["a", "b", "c", "d"])
    run_ranks("algorithm_rank.py", 1, model, out)

    rank = [sys.executable, str(HERE / "algorithm_rank.py"), str(model), str(out)]
    host = FollowerHost(RUN, redis_url, 1, timeout_s=60.0, command=rank, environment={"PYTHONPATH": str(ROOT)})
    host.start()
    leader = ForkedProcess([HERE / "rendezvous_rank.py", model, out, redis_url])
    try:
        assert leader.wait(timeout=240) == 0
    finally:
        leader.kill()
        host.stop()

    for name in ALGORITHMS:
        one, two = (load_file(out / f"{name}-of-{world}.safetensors") for world in (1, 2))
        assert one.keys() == two.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(tensor, two[key], rtol=0, atol=2e-5)
        of_one, of_two = (json.loads((out / f"{name}-of-{world}.json").read_text()) for world in (1, 2))
        assert of_two == pytest.approx(of_one, rel=1e-3, abs=1e-4)
