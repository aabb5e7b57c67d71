"""Frozen base model with named LoRA adapters, one of which is active.

Invariants: an adapter's initial weights depend only on its seed, and change no output; adapters do not affect each
other.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.services.tinker.records import Lora
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.lora import PREFIX, adapted_layers, save_adapter
from offbeat.trainer.models.packing import Packing
from offbeat.trainer.models.policy import PackedPolicy, packed_kwargs

ALPHA = 32.0
"""As in Tinker; the scale is alpha / rank."""
ATTENTION = "attn", "attention"
"""Substrings of paths."""


class AdapterPool:
    def __init__(self, policy: PackedPolicy, folder: Path) -> None:
        """folder: of the base model."""
        self.policy = policy
        self._folder = folder
        self._layers = _classify(policy.model)
        self._created = 0
        policy.requires_grad_(False)

    @property
    def vocab_size(self) -> int:
        return int(self.policy.model.config.get_text_config().vocab_size)

    @property
    def device(self) -> torch.device:
        return self.policy.model.device

    def add(self, lora: Lora) -> str:
        from peft import LoraConfig, inject_adapter_in_model  # slow to import  # noqa: PLC0415

        self._created += 1
        name = f"adapter{self._created}"
        layers = [path for kind in _kinds(lora) for path in self._layers[kind]]
        config = LoraConfig(r=lora.rank, lora_alpha=ALPHA, target_modules=layers)  # pyright: ignore[reportArgumentType]
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", ".*tie_word_embeddings.*"
            )  # the output embeddings' adapter is never merged
            warnings.filterwarnings("ignore", ".*Already found a `peft_config`.*")
            torch.manual_seed(lora.seed)
            inject_adapter_in_model(config, self.policy.model, name)
        return name

    def remove(self, name: str) -> None:
        model: Any = self.policy.model
        del model.peft_config[name]
        for layer in adapted_layers(model).values():
            layer.delete_adapter(name)

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """Return an adapter's factors by PEFT's names, in the model's order."""
        infix = f".{name}."
        return {
            PREFIX + path.replace(infix, "."): parameter
            for path, parameter in self.policy.model.named_parameters()
            if infix in path
        }

    def activate(self, name: str) -> None:
        """Compute with one adapter, whose parameters receive gradients."""
        for layer in adapted_layers(self.policy.model).values():
            layer.set_adapter(name)

    def logits(self, tokens: Tensor, borders: Tensor) -> Tensor:
        """Return the active adapter's logits after each packed token, [N, V]. borders: [B + 1] int"""
        return self.policy.model(tokens[None], **packed_kwargs(Packing.of(borders))).logits[0]

    def save(self, folder: Path, factors: Mapping[str, Tensor], rank: int) -> None:
        """Write a PEFT adapter."""
        args = ModelArgs(lora_target="all-linear", lora_rank=rank, lora_alpha=ALPHA)
        save_adapter(folder, factors, args, self._folder)


def _classify(model: Any) -> dict[str, list[str]]:
    """Return the paths of linear layers: attention, MLP, and output embeddings."""
    head = model.get_output_embeddings()
    layers: dict[str, list[str]] = {"attn": [], "mlp": [], "unembed": []}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            is_attention = any(part in path.lower() for part in ATTENTION)
            layers["unembed" if module is head else "attn" if is_attention else "mlp"].append(path)
    return layers


def _kinds(lora: Lora) -> list[str]:
    trained = {"attn": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
    return [kind for kind, is_trained in trained.items() if is_trained]
