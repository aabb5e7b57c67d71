"""A run kept whole: each recorded logprob is that of the weights that its version names, whichever engine sampled it."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from offbeat.deploy.config.loader import compose_tree, validate_tree
from offbeat.services.messages.types import Segment
from offbeat.trainer.training.batch_log import BatchLog
from tests.integration.mesh import TrainProcess
from tests.paths import QUICKSTART

pytestmark = [pytest.mark.alone, pytest.mark.timeout(400)]

FLOAT_NOISE = 3e-5
STEPS = 5
WHOLE = (f"max_steps={STEPS}", "save_steps=1", "max_ckpt_to_keep=100", "record_batches=100", "zero_variance=train")


@pytest.mark.parametrize("engine", ["hf_infer", "vllm"])
def test_recorded_logprobs_are_those_of_their_versions_weights(engine: str, tmp_path: Path) -> None:
    """Turns within one version; under `keep` a longer one continues on older keys and values, which its spans tell."""
    overrides = [*WHOLE, f"actor_infer.strategy_args.strategy_name={engine}"]
    train = TrainProcess(tmp_path / "run", *overrides)
    try:
        assert train.wait(300) == 0, train.output
    finally:
        train.close()

    @cache
    def model(version: int) -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / f"step-{version:06d}").eval()

    config = validate_tree(compose_tree(QUICKSTART, overrides))
    compared, mixed, versions = 0, 0, set[int]()
    for step in range(1, STEPS + 1):
        for segment, start, end in turns(BatchLog(tmp_path / "run").read(step, config).batch):
            named = set(segment.token_versions()[start:end].tolist())
            if len(named) > 1:
                mixed += 1
                continue
            with torch.no_grad():
                logits = model(named.pop())(torch.tensor(segment.tokens[None, :end]).long()).logits[0, start - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(segment.tokens[start:end]).long()[:, None])[:, 0]
            assert (expected - torch.tensor(segment.logprobs[start:end])).abs().max() < FLOAT_NOISE
            compared += end - start
            versions |= set(segment.token_versions()[start:end].tolist())
    assert compared > 1000
    assert mixed * 10 < compared
    assert len(versions) >= STEPS - 1, "batches lag by one version at most"


def turns(batch: Any) -> Iterator[tuple[Segment, int, int]]:
    for group in batch.groups:
        for trajectory in group.trajectories:
            for turn in trajectory.turns:
                yield trajectory.segments[turn.segment], turn.start, turn.end
