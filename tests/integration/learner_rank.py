"""One rank of a data-parallel learner: trains two steps on a fixed batch under each ZeRO stage and writes the weights."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from trainer.config import ModelArgs, StrategyArgs, TrainingArgs
from trainer.engines.base import Hyperparameters
from trainer.engines.deepspeed import DeepSpeedEngine
from trainer.engines.processes import process_group, ranks_of_environment
from trainer.models.packing import PackedInput
from trainer.models.policy import load_policy

SMOOTH = TrainingArgs(adam_epsilon=1e-3)
"""Adam with its usual epsilon makes full steps of gradients that are mere rounding, such as those of key biases."""


def fixed_batch(micro_batches: int = 3) -> list[PackedInput]:
    """Sequences of 4 to 9 tokens, cut into micro-batches; the same ones however they are cut."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 11, (n,), generator=generator) for n in (5, 4, 9, 6, 7, 8)]
    size = len(sequences) // micro_batches
    batch: list[PackedInput] = []
    for start in range(0, len(sequences), size):
        chosen = sequences[start : start + size]
        borders = torch.tensor([0, *(len(s) for s in chosen)]).cumsum(0)
        batch.append(PackedInput.of(torch.cat(chosen), borders, borders[1:] - 1))
    return batch


def main(model: Path, out: Path, stages: list[int]) -> None:
    torch.set_num_threads(1)
    ranks = ranks_of_environment("cpu")
    with process_group(ranks):
        for stage in stages:
            strategy = StrategyArgs.model_validate({"zero_stage": stage})
            engine = DeepSpeedEngine(load_policy(model, ModelArgs(), seed=1), SMOOTH, strategy, ranks)
            batch = fixed_batch()
            for _ in range(2):
                engine.train(batch, lambda _, said: -said.logprobs.sum() / 6, Hyperparameters(1e-2, 0.1))
            weights = {name: tensor.clone() for name, tensor in engine.tensors()}
            weights["logprobs"] = torch.cat(engine.infer(batch))
            if ranks.rank == 0:
                save_file(weights, out / f"stage{stage}-of-{ranks.world_size}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [int(stage) for stage in sys.argv[3:]])
