"""Training by the unmodified SDK, and the weights that it leads to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from safetensors.torch import load_file
from tinker import types

SENTENCE = [4, 9, 5, 8, 6, 7, 10, 4]
ADAM = types.AdamParams(learning_rate=5e-3)


def datum(tokens: Sequence[int] = SENTENCE, **inputs: Any) -> types.Datum:
    given = inputs or {"weights": np.ones(len(tokens) - 1, np.float32)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), **given},
    )


def create(service: tinker.ServiceClient, seed: int = 1, **settings: Any) -> tinker.TrainingClient:
    return service.create_lora_training_client("tiny", rank=4, seed=seed, **settings).result()


def train(client: tinker.TrainingClient, steps: int) -> list[float]:
    """Return the losses."""
    losses: list[float] = []
    for _ in range(steps):
        forward = client.forward_backward([datum(), datum(SENTENCE[2:])], "cross_entropy")
        step = client.optim_step(ADAM)
        losses.append(forward.result().metrics["loss:sum"])
        step.result()
    return losses


def sample(sampler: tinker.SamplingClient, num_samples: int = 1, **settings: Any) -> types.SampleResponse:
    prompt = types.ModelInput.from_ints(SENTENCE[:1])
    return sampler.sample(prompt, num_samples, types.SamplingParams(max_tokens=7, **settings)).result()


def adapter(folder: Path, path: str) -> dict[str, torch.Tensor]:
    """Return the weights behind a `tinker://` path. folder: `output_dir` of the server"""
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    (checkpoint,) = (folder / "tinker" / "checkpoints" / model_id / kind).glob(f"{name}@*")
    return load_file(checkpoint / "adapter_model.safetensors")


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
