"""One of four ranks that train small models by tensor parallelism, alone and with data parallelism; see
`test_tensor_parallel`."""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.engines.base import Hyperparameters
from offbeat.trainer.engines.fsdp2 import FSDP2Engine
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.losses.policy_loss import all_of, values_of
from offbeat.trainer.models.loading import load_critic, load_policy
from tests.integration.learner_rank import SMOOTH, fixed_batch

HYPER = Hyperparameters(1e-2, 0.1, head_learning_rate=1e-1)
STEPS = 2


def engine_of(model: Path, ranks: Ranks, tp_size: int, dtype: str = "float32") -> FSDP2Engine:
    args = ModelArgs.model_validate({"dtype": dtype, "disable_gradient_checkpointing": "untied" not in model.name})
    return FSDP2Engine(load_policy(model, args, seed=1, value_head=True), SMOOTH, ranks, tp_size)


def learn(engine: FSDP2Engine, steps: int) -> dict[str, Tensor]:
    """Return weights, norms of the gradients, and what the policy then says."""
    batch = fixed_batch()

    def loss(_: int, said: Any) -> Tensor:
        return ((values_of(said) - 1.0) ** 2).sum() / 6 - said.logprobs.sum() / 6

    outcomes = [engine.train(batch, loss, HYPER) for _ in range(steps)]
    weights = {name: tensor.clone() for name, tensor in engine.tensors()}
    norms = torch.tensor([outcome.grad_norm for outcome in outcomes])
    return weights | {"norms": norms, "said": torch.cat(engine.infer(batch, all_of), -1)}


def critic_learned(model: Path, ranks: Ranks, tp_size: int) -> dict[str, Tensor]:
    """Return what a critic of its own says after its steps."""
    engine = FSDP2Engine(load_critic(model, ModelArgs(), seed=1), SMOOTH, ranks, tp_size)
    batch = fixed_batch()
    for _ in range(STEPS):
        engine.train(batch, lambda _, values: ((values - 1.0) ** 2).sum() / 6, HYPER)
    return {"said": torch.cat(engine.infer(batch), -1)}


def half_learned(engine: FSDP2Engine, factor: float) -> dict[str, Tensor]:
    """Steps in float16 that find the scale, and one whose gradient overflows by `factor`."""
    batch = fixed_batch()
    left = STEPS
    while left:
        left -= engine.train(batch, lambda _, said: -said.logprobs.sum() / 6, HYPER).applied
    overflow = engine.train(batch, lambda _, said: -said.logprobs.sum() / 6 * factor, HYPER)
    scales = torch.tensor([overflow.loss_scale or 0.0, float(overflow.applied)])
    return {name: tensor.clone() for name, tensor in engine.tensors()} | {"scales": scales}


def main(models: Path, out: Path) -> None:
    torch.set_num_threads(1)
    with process_group(ranks_of_environment("cpu")) as ranks:
        results: dict[str, dict[str, Tensor]] = {}
        for model in sorted(models.iterdir()):
            for tp_size in (2, 4):
                engine = engine_of(model, ranks, tp_size)
                results[f"{model.name}-{tp_size}"] = learn(engine, STEPS)
                if tp_size == 2:
                    engine.save(out / f"{model.name}-state")
            engine = engine_of(model, ranks, 4)
            engine.load(out / f"{model.name}-state")
            results[f"{model.name}-resumed"] = learn(engine, 1)
            results[f"{model.name}-critic"] = critic_learned(model, ranks, 2)
        half = engine_of(models / "tied", ranks, 2, "float16")
        results["half"] = half_learned(half, 1e6 if ranks.data_rank == 0 else 1.0)
        if ranks.rank == 0:
            for name, tensors in results.items():
                save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, out / f"{name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
