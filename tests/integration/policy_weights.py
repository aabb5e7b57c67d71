"""Tiny policies with random weights, and what transformers says about tokens that an engine sampled."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, Qwen2ForCausalLM

from offbeat.services.messages.types import Completion, GenerateRequest
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import write_tiny_policy

WORDS = [f"w{i}" for i in range(25)]
VOCABULARY = 32


def write_policy(folder: Path, **sizes: int) -> Path:
    """A model folder without weights; 32 tokens, contexts of 512."""
    write_tiny_policy(folder, TinyPolicyConfig(**sizes), WORDS)
    return folder


def random_policy(folder: Path, seed: int) -> Any:
    """The folder's architecture with weights of this seed, float32."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(AutoConfig.from_pretrained(folder)).float().eval()


def named_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """What a learner publishes: a tied head goes without saying."""
    yield from model.named_parameters()


def save_weights(model: Any, path: Path) -> Path:
    save_file({name: tensor.detach().clone() for name, tensor in named_tensors(model)}, path)
    return path


def logprobs(model: Any, request: GenerateRequest, tokens: tuple[int, ...], *, top_k: int | None = None) -> Tensor:
    """[len(tokens)] float32: by one plain forward over prompt and tokens, temperature applied."""
    sequence = torch.tensor([request.prompt + tokens])
    with torch.no_grad():
        logits = model(sequence).logits[0, len(request.prompt) - 1 : -1].float()
    logits = logits / (request.sampling.temperature or 1.0)
    if top_k is not None:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)


def mismatch(model: Any, request: GenerateRequest, completion: Completion, *, top_k: int | None = None) -> Tensor:
    """[tokens] absolute difference between the engine's logprobs and the model's."""
    assert not completion.error, completion.error
    return (logprobs(model, request, completion.token_ids, top_k=top_k) - torch.tensor(completion.logprobs)).abs()
