"""Where float16 training is refused."""

import pytest
import torch

from offbeat.trainer.checks.learner import check_learner
from offbeat.trainer.config.learner import LearnerConfig

FSDP2 = {"strategy_args": {"strategy_name": "fsdp2_train"}}


@pytest.mark.parametrize(
    ("supported", "train", "refused"),
    [
        (False, {}, True),
        (True, {}, False),
        (False, FSDP2, False),
        (False, {"device": "cuda"}, False),
        (False, {"model_args": {"dtype": "bfloat16"}}, False),
    ],
)
def test_deepspeed_needs_a_cpu_with_float16(
    monkeypatch: pytest.MonkeyPatch, supported: bool, train: dict[str, object], refused: bool
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: supported)
    config = LearnerConfig.model_validate({"actor_train": {"model_args": {"dtype": "float16"}, **train}})
    found = {issue.path: issue.message for issue in check_learner(config)}
    assert ("actor_train.model_args.dtype" in found) == refused
    assert not refused or "fsdp2_train" in found["actor_train.model_args.dtype"]
