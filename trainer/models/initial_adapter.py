"""Adapters that are trained from those of a folder (`adapter_name_or_path`), or of a checkpoint.

Invariant: a second, frozen copy stays in the model, and is the policy's start for a KL, as in TRL.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from offbeat.services.generation.adapter_settings import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.adapter_files import (
    AdapterError,
    AdapterFiles,
    base_difference,
    read_adapter,
    scale_differences,
)
from offbeat.trainer.models.lora import ADAPTER, INITIAL, adapted_layers, inject_adapters


def load_initial_adapter(model: nn.Module, args: ModelArgs, folder: Path) -> None:
    """Give the model's new adapters the factors of a folder, and add the frozen copy.

    Raises:
        ValueError: the folder's adapter does not fit.
    """
    files, layers = read_adapter(folder), adapted_layers(model)
    _check_fit(files, layers, args)
    inject_adapters(model, list(layers), args, INITIAL)
    factors = load_file(folder / ADAPTER_WEIGHTS)
    with torch.no_grad():
        for path, layer in layers.items():
            for name in (ADAPTER, INITIAL):
                for factor in ("lora_A", "lora_B"):
                    getattr(layer, factor)[name].weight.copy_(factors[f"{PREFIX}{path}.{factor}.weight"])
    for layer in layers.values():
        layer.set_adapter(ADAPTER)  # which freezes the others


def check_resumed_adapter(folder: Path, args: ModelArgs) -> None:
    """Check that a checkpoint's adapters, if it has any, have the run's scale and base, which its state does not tell.

    Raises:
        RuntimeError: others, with which they would be another policy.
    """
    if not args.has_adapters or not (folder / ADAPTER_CONFIG).is_file():
        return
    try:
        files = read_adapter(folder)
    except AdapterError as error:
        raise RuntimeError(str(error)) from error
    for key, own, other in (*scale_differences(args, files), *base_difference(args, files)):
        raise RuntimeError(
            f"{folder} was trained with {key} {other}, and this run has {own}: set actor_train.model_args.{key}={other}"
        )


@contextmanager
def with_initial_adapters(model: nn.Module) -> Iterator[None]:
    """Compute with the adapters of the folder; without any if the run starts from none."""
    # `enable_adapters` would set requires_grad as well, which FSDP2 keeps in two parameters, of which a layer shows one
    layers = adapted_layers(model).values()
    active = [(layer, layer._disable_adapters, layer._active_adapter) for layer in layers]
    for layer, _, _ in active:
        if INITIAL in layer.lora_A:
            layer._active_adapter = [INITIAL]
        else:
            layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, is_disabled, names in active:
            layer._disable_adapters, layer._active_adapter = is_disabled, names


def _check_fit(files: AdapterFiles, layers: dict[str, Any], args: ModelArgs) -> None:
    of_base = () if files.quantization is None else base_difference(args, files)
    for key, own, other in (*scale_differences(args, files), *of_base):
        raise ValueError(f"{key} {own} contradicts the adapter in {files.folder}, of {other}")
    if absent := sorted(files.layers - set(layers)):
        raise ValueError(
            f"the adapter in {files.folder} is of {absent[0]} ({len(absent)} in all), which the run does not adapt"
        )
    if new := sorted(set(layers) - files.layers):
        raise ValueError(
            f"lora_target {args.lora_target!r} names {new[0]} ({len(new)} in all), which the adapter in {files.folder} has "
            "not: name its layers alone"
        )
    for path, layer in layers.items():
        size = (layer.in_features, layer.out_features)
        if size != files.shapes[path]:
            raise ValueError(
                f"the adapter in {files.folder} is of {path} with {files.shapes[path]} inputs and outputs, the model's has "
                f"{size}: it was trained on another model ({files.base or 'unnamed'})"
            )
