"""States of engines with adapters, between two turns: on a CPU, a copy stands for the other device's memory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from offbeat.trainer.config.actor_train import ModelArgs, StrategyArgs
from offbeat.trainer.engines.deepspeed import DeepSpeedEngine
from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.models.loading import load_policy
from tests.integration.learner_rank import SMOOTH, fixed_batch
from tests.trainer.engines.comparing import STEP, assert_same, nll, weights_of

pytestmark = pytest.mark.slow
STAGES = [(0, "float32"), (2, "float32"), (3, "float32"), (2, "bfloat16"), (3, "bfloat16")]


class CopiesToDevices(TorchFunctionMode):
    """Returns copies where a tensor is moved to another device."""

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_move = func is Tensor.to and len(args) > 1 and not isinstance(args[1], torch.dtype | Tensor)
        return result.clone() if is_move and result is args[0] else result


def adapted(folder: Path, ranks: Ranks, stage: int, dtype: str) -> DeepSpeedEngine:
    args = ModelArgs.model_validate({"dtype": dtype, "lora_target": "all-linear", "lora_rank": 4})
    strategy = StrategyArgs.model_validate({"zero_stage": stage})
    return DeepSpeedEngine(load_policy(folder, args, seed=1), SMOOTH, strategy, ranks)


def held_weights(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Return what holds the weights between the passes, which keeps its memory from being used again."""
    named = engine._engine.module.named_parameters()
    return {name: getattr(weight, "ds_tensor", weight).data for name, weight in named}


@pytest.mark.parametrize(("stage", "dtype"), STAGES)
def test_frozen_weights_leave_and_return_with_the_adapters(folder: Path, ranks: Ranks, stage: int, dtype: str) -> None:
    moved, resident = (adapted(folder, ranks, stage, dtype) for _ in range(2))
    for engine in (moved, resident):
        engine.train(fixed_batch(), nll, STEP)
    for _ in range(2):
        for move in (moved.offload_states, moved.load_states):
            before = held_weights(moved)
            with CopiesToDevices():
                move()
            after = held_weights(moved)
            stayed = [name for name, weight in before.items() if after[name].data_ptr() == weight.data_ptr()]
            assert not stayed, f"{len(stayed)} of {len(before)} weights stayed at {move.__name__}"
        outcomes = [engine.train(fixed_batch(), nll, STEP) for engine in (moved, resident)]
        assert outcomes[0] == outcomes[1]
    assert_same(weights_of(moved), weights_of(resident))
