"""Checks of the adapter that a run starts from, or resumes with."""

import logging
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from offbeat.deploy.config.checks.model import find_checkpoint
from offbeat.deploy.config.checks.weight_files import weight_shapes
from offbeat.deploy.config.run import RunConfig
from offbeat.services.generation.adapter_settings import ADAPTER_CONFIG
from offbeat.services.generation.kv_cache import text_config
from offbeat.services.generation.tenancy import read_architecture
from offbeat.trainer.config.adapter_files import (
    AdapterError,
    AdapterFiles,
    base_difference,
    read_adapter,
    scale_differences,
)
from offbeat.trainer.config.issue import ConfigIssue

logger = logging.getLogger(__name__)

ARGS = "actor_train.model_args"
KEY = f"{ARGS}.adapter_name_or_path"
ADAPTER = "adapter"
"""Folder of a checkpoint."""
TARGET = "lora_target"
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def check_adapter(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield an adapter that can't be read, or that other keys contradict, and keys that contradict a checkpoint's."""
    yield from _check_resumed(config)
    args, folder = config.actor_train.model_args, Path(config.pretrain)
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        yield ConfigIssue("pretrain", f"{folder} is a LoRA adapter: set pretrain to its base, and {KEY} to the adapter")
    if args.adapter_name_or_path is None:
        return
    if config.warm_start is not None:
        yield ConfigIssue(KEY, "warm_start trains all weights, before adapters are new: leave one of them out")
    role = config.reference
    is_policy = config.needs_reference and role.model_args.model_name_or_path is None
    if is_policy and role.strategy_args.placement == "service":
        yield ConfigIssue(
            "reference.strategy_args.placement",
            f"a service has the base alone, and the reference is the policy with the adapter of {KEY}: take learner",
        )
    try:
        files = read_adapter(Path(args.adapter_name_or_path))
    except AdapterError as error:
        yield ConfigIssue(KEY, str(error))
        return
    for key, own, other in scale_differences(args, files):
        yield ConfigIssue(
            f"{ARGS}.{key}", f"{own} contradicts the adapter {files.folder}, which has {other}: leave it out"
        )
    if files.quantization is not None:
        for key, own, other in base_difference(args, files):
            yield ConfigIssue(
                f"{ARGS}.{key}", f"{own}, and the adapter {files.folder} was trained on a base with {other}: take that"
            )
    yield from _check_layers(config, files)
    if files.base and Path(files.base).name not in config.pretrain.replace("--", "/").split("/"):
        logger.warning("%s was trained on %s, and pretrain is %s", files.folder, files.base, config.pretrain)


def _check_resumed(config: RunConfig) -> Iterator[ConfigIssue]:
    """Yield another scale of adapters, or another base, than the checkpoint's, which would change the policy at once."""
    checkpoint, args = find_checkpoint(config), config.actor_train.model_args
    # a build before 0.2 saved no adapter, nor did a run without, which the learner refuses
    if checkpoint is None or not args.has_adapters or not (checkpoint / ADAPTER / ADAPTER_CONFIG).is_file():
        return
    try:
        files = read_adapter(checkpoint / ADAPTER)
    except AdapterError as error:
        yield ConfigIssue("resume_from_checkpoint", str(error))
        return
    for key, own, other in (*scale_differences(args, files), *base_difference(args, files)):
        yield ConfigIssue(
            f"{ARGS}.{key}",
            f"{own}, and the adapters of the checkpoint {checkpoint} were trained with {other}: take that",
        )


def _check_layers(config: RunConfig, files: AdapterFiles) -> Iterator[ConfigIssue]:
    names = config.actor_train.model_args.lora_targets
    if not isinstance(names, str):
        endings = tuple(f".{name}" for name in names)
        others = [layer for layer in files.layers if not f".{layer}".endswith(endings)]
        new = [name for name in names if not any(f".{layer}".endswith(f".{name}") for layer in files.layers)]
        if others or new:
            yield ConfigIssue(
                f"{ARGS}.{TARGET}",
                f"{','.join(names)} contradicts the adapter {files.folder}, which is of {','.join(files.targets)}: leave it "
                "out",
            )
    if config.pretrain == "tiny":
        return
    try:
        shapes = dict(weight_shapes(config.pretrain))
    except (OSError, ValueError):
        return  # an unreadable model has its own error
    for layer, (inputs, outputs) in sorted(files.shapes.items()):
        shape = shapes.get(f"{layer}.weight", [outputs, inputs])
        if shape != [outputs, inputs]:
            yield ConfigIssue(
                KEY,
                f"{files.folder} is of {layer} with {inputs} inputs and {outputs} outputs, and pretrain has {shape[-1]} and "
                f"{shape[0]}: take its base ({files.base or 'unnamed'})",
            )
            return
    yield from _check_numbers(config, files, shapes)


def _check_numbers(config: RunConfig, files: AdapterFiles, weights: Iterable[str]) -> Iterator[ConfigIssue]:
    """Yield layers of the model that differ from an adapter's by their number alone, and that `lora_target` names, too."""
    names = config.actor_train.model_args.lora_targets
    endings = ("",) if isinstance(names, str) else tuple(f".{name}" for name in names)
    paths = {NUMBER.sub("#", layer) for layer in files.layers}
    layers = {name.removesuffix(".weight") for name in weights if name.endswith(".weight")} - files.layers
    new = [layer for layer in layers if NUMBER.sub("#", layer) in paths and f".{layer}".endswith(endings)]
    count = _count_layers(Path(config.pretrain))  # files may have more, for multi-token prediction
    new = [layer for layer in new if all(int(number) < count for number in NUMBER.findall(layer))]
    if new:
        yield ConfigIssue(
            f"{ARGS}.{TARGET}",
            f"{config.actor_train.model_args.lora_target} names {min(new)} ({len(new)} in all), which the adapter "
            f"{files.folder} has not: name its layers alone (such as {min(files.layers)})",
        )


def _count_layers(folder: Path) -> float:
    """Return the number of layers; infinite if `config.json` has none."""
    try:
        return text_config(read_architecture(folder)).get("num_hidden_layers", math.inf)
    except (OSError, ValueError):
        return math.inf
