"""Low-rank adapters (LoRA, arXiv:2106.09685) through PEFT.

Invariants: new adapters change no output; only adapters are trained; checkpoints contain W + scale B A under Hugging
Face names.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from offbeat.services.generation.adapter_settings import ADAPTER_WEIGHTS, PREFIX
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.models.multimodal import towers
from offbeat.trainer.models.quantization import QuantizedLinear, silence_bitsandbytes, write_quantization

ADAPTER = "default"
INITIAL = "initial"
"""Frozen copy of an adapter that training started from; never exported."""
BASE = ".base_layer."
"""PEFT's infix."""
FACTORS = (".lora_A.", ".lora_B.")
ROUTER = ".router."
"""Part of the paths of routers that are linear layers (Granite 3 MoE, AFMoE), for which vLLM takes no adapter."""
WeightForm = Literal["merged", "parts", "adapter"]
"""`merged`: adapters in their base; `parts`: base and adapters, these by PEFT's names; `adapter`: adapters alone."""


def add_adapters(model: nn.Module, args: ModelArgs, seed: int) -> None:
    """Freeze the model and adapt `lora_target`.

    Raises:
        ValueError: a layer is unknown, not linear, or shares its weight.
    """
    paths = _target_paths(model, args)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapters(model, paths, args, ADAPTER)


def inject_adapters(model: nn.Module, paths: Sequence[str], args: ModelArgs, name: str) -> None:
    """Adapt the linear layers of exactly these paths."""
    silence_bitsandbytes()
    from peft import LoraConfig, inject_adapter_in_model  # slow to import  # noqa: PLC0415

    # PEFT maps names such as gate_proj, also in full paths, to the stacked experts of a mixture that it knows by its config
    wrapper = nn.Module()
    wrapper.model = model
    targets = [f"model.{path}" for path in paths]
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.adapter_alpha,  # pyright: ignore[reportArgumentType]
        use_rslora=args.use_rslora,
        target_modules=targets,
    )
    inject_adapter_in_model(config, wrapper, name)


def linear_paths(model: nn.Module) -> dict[str, nn.Linear]:
    """Return all linear layers but routers and towers, the output embedding included; stacked experts are none, nor are
    subclasses, which may compute something else.
    """
    return {
        path: module
        for path, module in language_modules(model)
        if type(module) is nn.Linear and ROUTER not in f".{path}."
    }


def language_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules outside of a multimodal model's towers."""
    outside = {id(module) for tower in towers(model) for module in tower.modules()}
    return ((path, module) for path, module in model.named_modules() if id(module) not in outside)


def base_paths(model: Any) -> list[str]:
    """Return the linear layers of a frozen base, adapted ones included: all but routers, towers and the output embedding."""
    head = model.get_output_embeddings()
    head = getattr(head, "base_layer", head)
    paths = {path for path, layer in linear_paths(model).items() if layer is not head}
    return sorted(path for path in paths if not any(factor in f"{path}." for factor in FACTORS))


def _target_paths(model: Any, args: ModelArgs) -> list[str]:
    linear, names = linear_paths(model), args.lora_targets
    target, kind = f"lora_target {args.lora_target!r}", type(model).__name__
    if isinstance(names, str):
        head = model.get_output_embeddings()
        if paths := [path for path, layer in linear.items() if layer is not head]:
            return paths
        raise ValueError(f"{target} names no layer, as {kind} has no torch.nn.Linear: leave it out")
    endings = tuple(f".{name}" for name in names)
    paths = [path for path, _ in language_modules(model) if f".{path}".endswith(endings)]
    shared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for path in paths:
        if path not in linear or id(linear[path].weight) in shared:
            raise ValueError(
                f"{target} names {path}, which is not a linear layer with an unshared weight (stacked experts and their "
                "routers are none): name other layers, or set all-linear"
            )
    if not paths:
        raise ValueError(f"{target} names no layer of {kind}: name linear layers, or set all-linear")
    return paths


@dataclass(frozen=True, slots=True)
class ExportedWeight:
    """name: with the wrapper's prefix; parts: parameter or buffer, or base, A and B; scaling: of the product B A."""

    name: str
    parts: list[Tensor]
    scaling: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parts[0].shape)

    @torch.no_grad()
    def tensor(self, read: Callable[[Tensor], Tensor] = Tensor.detach) -> Tensor:
        """Compute the weight. read: returns a whole part, in the dtype that it is computed in."""
        base, *factors = map(read, self.parts)
        if not factors:
            return base
        down, up = factors
        return (base.float() + self.scaling * (up.float() @ down.float())).to(base.dtype)


def exported_weights(module: nn.Module, form: WeightForm, wrapper: str) -> Iterator[ExportedWeight]:
    """Yield a model's weights; they include buffers that its checkpoints have, such as biases of routers."""
    if form == "merged":
        return merged_weights(module)
    return unmerged_weights(module, wrapper) if form == "parts" else adapter_weights(module, wrapper)


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a checkpoint has: parameters, tied ones once, persistent buffers, and the values of quantized weights."""
    yield from module.named_parameters()
    # not by `state_dict`: FSDP2 frees gathered parameters at each call of it
    for path, owner in module.named_modules():
        if isinstance(owner, QuantizedLinear):
            yield f"{path}.weight", owner.weight
            continue
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def merged_weights(module: nn.Module) -> Iterator[ExportedWeight]:
    layers = adapted_layers(module)
    for name, parameter in named_weights(module):
        owner, base, rest = name.rpartition(BASE)
        if base and rest == "weight":
            yield _merged(f"{owner}.{rest}", parameter, layers[owner])
        elif base:
            yield ExportedWeight(f"{owner}.{rest}", [parameter])
        elif not any(factor in name for factor in FACTORS):
            yield ExportedWeight(name, [parameter])


def unmerged_weights(module: nn.Module, wrapper: str) -> Iterator[ExportedWeight]:
    """Yield base weights, and adapter factors by PEFT's names."""
    yield from adapter_weights(module, wrapper)
    for name, parameter in named_weights(module):
        if not any(factor in name for factor in FACTORS):
            yield ExportedWeight(name.replace(BASE, "."), [parameter])


def adapter_weights(module: nn.Module, wrapper: str) -> Iterator[ExportedWeight]:
    """Yield adapter factors by PEFT's names."""
    for name, parameter in module.named_parameters():
        if any(factor in name for factor in FACTORS) and f".{INITIAL}." not in name:
            yield ExportedWeight(PREFIX + name.removeprefix(wrapper).replace(f".{ADAPTER}.", "."), [parameter])


def save_adapter(folder: Path, factors: Mapping[str, Tensor], args: ModelArgs, base: Path) -> None:
    silence_bitsandbytes()
    from peft import LoraConfig  # noqa: PLC0415

    layers = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in factors})
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.adapter_alpha,  # pyright: ignore[reportArgumentType]
        use_rslora=args.use_rslora,
        target_modules=layers,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base.resolve()),
        inference_mode=True,
    )
    config.target_modules = layers  # not PEFT's set, whose order differs from process to process
    folder.mkdir()
    config.save_pretrained(str(folder))
    save_file(dict(factors), folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    if args.load_in_4bit:
        write_quantization(folder, args)


def _merged(name: str, base: Tensor, layer: Any) -> ExportedWeight:
    parts = [base, layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]
    return ExportedWeight(name, parts, layer.scaling[ADAPTER])


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """Return adapted layers, without importing PEFT."""
    return {name: layer for name, layer in module.named_modules() if hasattr(layer, "lora_A")}
