"""Frozen base model with named LoRA adapters, one of which is active, or one per span of tokens.

Invariants: an adapter's initial weights depend only on its seed, and change no output; they are float32, whatever the
base's type; adapters do not affect each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.services.errors import CodecError
from offbeat.services.generation.adapter_settings import PREFIX
from offbeat.services.tinker.records import Lora
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.lora import adapted_layers, inject_adapters, linear_paths, save_adapter
from offbeat.trainer.models.packing import Packing
from offbeat.trainer.models.policy import PackedPolicy, packed_kwargs

ALPHA = 32.0
"""As in Tinker; the scale is alpha / rank."""
ATTENTION = "attn", "attention"
"""Substrings of paths."""


class Span(NamedTuple):
    """Packed tokens, and the adapter that they are computed with; None: the base model."""

    adapter: str | None
    num_tokens: int


class AdapterPool:
    def __init__(self, policy: PackedPolicy, folder: Path) -> None:
        """folder: of the base model."""
        self.policy = policy
        self._folder = folder
        self._layers = _classify(policy.model)
        self._created = 0
        self._adapted: list[Any] = []
        policy.requires_grad_(False)

    @property
    def vocab_size(self) -> int:
        return int(self.policy.model.config.get_text_config().vocab_size)

    @property
    def device(self) -> torch.device:
        return self.policy.model.device

    def add(self, lora: Lora) -> str:
        """Add an adapter; return its name. Raises CodecError if the base model has none of its layers."""
        kinds = _kinds(lora)
        if not (layers := [path for kind in kinds for path in self._layers[kind]]):
            wanted = " and ".join(f"train_{kind}" for kind in kinds)
            raise CodecError(
                f"the base model has no linear layer for {wanted} alone, as experts take no adapters: train others, too"
            )
        self._created += 1
        name = f"adapter{self._created}"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(lora.seed)
            inject_adapters(self.policy.model, layers, _args(lora.rank), name)
        self._make_trainable()
        for parameter in self.parameters(name).values():
            parameter.data = parameter.data.float()  # PEFT takes the base's type, in which small steps are lost
        return name

    def remove(self, name: str) -> None:
        for layer in self._adapted:
            layer.delete_adapter(name)
        self._make_trainable()

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Return an adapter's factors by PEFT's names, in the model's order."""
        infix = f".{name}."
        return {
            PREFIX + path.replace(infix, "."): parameter
            for path, parameter in self.policy.model.named_parameters()
            if infix in path
        }

    def activate(self, *names: str) -> None:
        """Compute with one adapter, whose parameters receive gradients, or with none."""
        for layer in self._adapted:
            layer._active_adapter = list(names)  # `set_adapter` would walk over all adapters' parameters

    @contextmanager
    def routed(self, spans: Sequence[Span]) -> Iterator[None]:
        """Compute each span of packed tokens with its adapter."""
        self.activate()
        hooks = [layer.register_forward_hook(partial(_add_adapters, spans)) for layer in self._adapted]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def logits(self, tokens: Tensor, borders: Tensor) -> Tensor:
        """Return the logits after each packed token, [N, V]. borders: [B + 1] int"""
        return self.policy.model(tokens[None], **packed_kwargs(Packing.of(borders))).logits[0]

    def save(self, folder: Path, factors: Mapping[str, Tensor], rank: int) -> None:
        """Write a PEFT adapter."""
        save_adapter(folder, factors, _args(rank), self._folder)

    def _make_trainable(self) -> None:
        """Let every adapter receive gradients, of which PEFT allows the active one alone."""
        self._adapted = list(adapted_layers(self.policy.model).values())
        for layer in self._adapted:
            layer.lora_A.requires_grad_(True)
            layer.lora_B.requires_grad_(True)


def _args(rank: int) -> ModelArgs:
    return ModelArgs(lora_target="all-linear", lora_rank=rank, lora_alpha=ALPHA)


def _add_adapters(spans: Sequence[Span], layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Add to a base layer's output what each span's adapter does. output: [1, N, out]"""
    parts: list[Tensor] = []
    for (name, _), rows, base in zip(
        spans, inputs[0].split(sizes := [each.num_tokens for each in spans], 1), output.split(sizes, 1), strict=True
    ):
        if name in layer.lora_A:
            down, up = layer.lora_A[name], layer.lora_B[name]
            parts.append(up(down(rows.to(down.weight.dtype))) * layer.scaling[name])
        else:
            parts.append(torch.zeros_like(base))
    return (output + torch.cat(parts, 1)).to(output.dtype)


def _classify(model: Any) -> dict[str, list[str]]:
    """Return the paths of linear layers: attention, MLP, and output embeddings."""
    head = model.get_output_embeddings()
    layers: dict[str, list[str]] = {"attn": [], "mlp": [], "unembed": []}
    for path, module in linear_paths(model).items():
        is_attention = any(part in path.lower() for part in ATTENTION)
        layers["unembed" if module is head else "attn" if is_attention else "mlp"].append(path)
    return layers


def _kinds(lora: Lora) -> list[str]:
    trained = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
    return [kind for kind, is_trained in trained.items() if is_trained]
