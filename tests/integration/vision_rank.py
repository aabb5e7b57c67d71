"""One rank that trains a policy with image input on passes with images and without; see `test_vision_ranks`."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from offbeat.services.chat.vision import ImageProcessor, encode_png
from offbeat.services.messages.types import PromptImage
from offbeat.trainer.config.actor_train import ActorTrainConfig, ModelArgs, StrategyArgs
from offbeat.trainer.engines.base import Hyperparameters
from offbeat.trainer.engines.factory import make_engine
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.models.loading import load_policy
from offbeat.trainer.models.packing import PackedInput
from tests.integration.learner_rank import SHARDED, SMOOTH
from tests.trainer.engines.comparing import nll

HYPER = Hyperparameters(1e-2, 0.1)
ENGINES: dict[str, dict[str, Any]] = {
    "zero-0": {"zero_stage": 0},
    "zero-2": {"zero_stage": 2},
    "zero-3": {"zero_stage": 3, "strategy_config": SHARDED},
    "fsdp2": {"strategy_name": "fsdp2_train"},
    "fsdp2-lora": {"strategy_name": "fsdp2_train"},
    "zero-3-lora": {"zero_stage": 3, "strategy_config": SHARDED},
}
IMAGES = ((2, 3), None, None, (1, 1), (3, 1))
"""Rows and columns of tokens of each pass's image; passes of two ranks differ in whether they have one."""


def batch_of(folder: Path) -> list[PackedInput]:
    reader = ImageProcessor(folder)
    batch: list[PackedInput] = []
    for number, size in enumerate(IMAGES):
        images: tuple[PromptImage, ...] = ()
        tokens = [3, 4, 5]
        if size is not None:
            rows, columns = size
            pixels = np.random.default_rng(number).integers(0, 256, (32 * rows, 32 * columns, 3), dtype=np.uint8)
            png = encode_png(pixels)
            images = (PromptImage(len(tokens), count := reader.count(png), png),)
            tokens += [reader.image_token_id] * count
        tokens += [6, 7, 8]
        positions = torch.arange(len(tokens) - 2, len(tokens))
        batch.append(PackedInput.of(torch.tensor(tokens), torch.tensor([0, len(tokens)]), positions, images=images))
    return batch


def learned(folder: Path, engine: str, ranks: Ranks) -> dict[str, Tensor]:
    """Return weights, norms of the gradients, and what the policy then says."""
    train = ActorTrainConfig(
        model_args=ModelArgs(
            image_input=True,
            disable_gradient_checkpointing=engine != "fsdp2",
            lora_target="all-linear" if "lora" in engine else None,
        ),
        training_args=SMOOTH,
        strategy_args=StrategyArgs.model_validate(ENGINES[engine]),
    )
    made = make_engine(load_policy(folder, train.model_args, seed=1), train, ranks)
    batch = batch_of(folder)
    norms = torch.tensor([made.train(batch, nll, HYPER).grad_norm for _ in range(2)])
    weights = {name: tensor.clone() for name, tensor in made.tensors()}
    return weights | {"norms": norms, "said": torch.cat(made.infer(batch), -1)}


def main(folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    with process_group(ranks_of_environment("cpu")) as ranks:
        for engine in ENGINES:
            tensors = learned(folder, engine, ranks)
            if ranks.rank == 0:
                save_file(
                    {name: tensor.contiguous() for name, tensor in tensors.items()}, out / f"{engine}.safetensors"
                )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
