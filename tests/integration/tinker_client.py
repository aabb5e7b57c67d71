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
FLOAT_NOISE = 2e-5
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


def check_learning(service: tinker.ServiceClient, noise: float = FLOAT_NOISE) -> None:
    """Check that a model learns, that its samples have the trained logprobs, and what the server says of it."""
    client = create(service)
    sampler = check_logprobs(client, noise)
    assert client.get_tokenizer().vocab_size == sampler.get_tokenizer().vocab_size
    info = client.get_info()
    assert (info.lora_rank, info.model_name) == (4, "tiny")


def check_logprobs(client: tinker.TrainingClient, noise: float = FLOAT_NOISE) -> tinker.SamplingClient:
    """Check that a new model learns, and that its samples have the trained logprobs; return their client."""
    losses = train(client, 20)
    assert losses[-1] < 0.2 * losses[0]
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt, params = types.ModelInput.from_ints(SENTENCE[:1]), types.SamplingParams(max_tokens=7, temperature=0.0)
    (greedy,) = sampler.sample(prompt, 1, params, topk_sample_logprobs=3).result().sequences
    assert list(greedy.tokens) == SENTENCE[1:]
    best = [place[0] for place in greedy.topk_logprobs or () if place]
    assert best == list(zip(greedy.tokens, greedy.logprobs or (), strict=True))
    assert greedy.stop_reason == "length"
    scores = client.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    np.testing.assert_allclose(greedy.logprobs, scores.data, atol=noise)
    first, *rest = sampler.compute_logprobs(types.ModelInput.from_ints(SENTENCE)).result()
    assert first is None
    np.testing.assert_allclose(np.array(rest, float), scores.data, atol=noise)
    return sampler


def check_samplers(service: tinker.ServiceClient) -> None:
    """Check that a snapshot stays, and that `inflight` follows."""
    client = create(service)
    before = client.save_weights_and_get_sampling_client().result()
    newest = client.save_weights_and_get_sampling_client(kind="inflight").result()
    base = service.create_sampling_client(base_model="tiny").result()
    first = sample(base, temperature=0.0).sequences[0]
    for sampler in (before, newest):
        answer = sample(sampler, temperature=0.0).sequences[0]
        assert list(answer.tokens) == list(first.tokens)
    train(client, 20)
    client.save_weights_and_get_sampling_client(kind="inflight").result()
    assert list(sample(before, temperature=0.0).sequences[0].tokens) == list(first.tokens)
    assert list(sample(newest, temperature=0.0).sequences[0].tokens) == SENTENCE[1:]
