"""LoRA adapters in PEFT's form: `adapter_config.json` and `adapter_model.safetensors`; and `quantization_config.json` if
their base is quantized.

Invariant: an adapter that is read has a pair of factors per linear layer, of one rank and one scale, and nothing else.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from offbeat.services.generation.adapter_settings import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX, QUANTIZATION_CONFIG
from offbeat.trainer.config.actor_train import ModelArgs

FACTOR = re.compile(re.escape(PREFIX) + r"(?P<layer>.+)\.(?P<factor>lora_[AB])\.weight")
OTHER_FORMS = (
    *("use_dora", "lora_bias", "use_qalora", "use_bdlora", "rank_pattern", "alpha_pattern", "layer_replication"),
    *("modules_to_save", "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "arrow_config"),
    *("kasa_config", "monteclora_config", "velora_config", "fan_in_fan_out"),
)
"""PEFT's settings that change what an adapter computes, or add to it."""
KEEPS_BASE = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base's weights as they are."""

QUANTIZATION_KEYS = {
    "load_in_4bit": "load_in_4bit",
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "use_bnb_nested_quant": "bnb_4bit_use_double_quant",
}
"""Keys -> those of `BitsAndBytesConfig`."""


class AdapterError(ValueError):
    """Folder without an adapter of this form."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    folder: Path
    rank: int
    alpha: float
    use_rslora: bool
    base: str
    """`base_model_name_or_path`; may be empty."""
    shapes: dict[str, tuple[int, int]]
    """Layer -> its inputs and outputs."""
    quantization: dict[str, Any] | None
    """How its base is quantized; None if it is not, or if nothing says so."""

    @property
    def scale_keys(self) -> dict[str, int | float | bool]:
        """Return the keys that the settings imply."""
        return {"lora_rank": self.rank, "lora_alpha": self.alpha, "use_rslora": self.use_rslora}

    @property
    def layers(self) -> set[str]:
        return set(self.shapes)

    @property
    def targets(self) -> list[str]:
        """Return the layers' last names, sorted."""
        return sorted({layer.rpartition(".")[2] for layer in self.shapes})


def read_adapter(folder: Path) -> AdapterFiles:
    """Read settings and shapes.

    Raises:
        AdapterError: no adapter, or one of another form.
    """
    if not folder.is_dir():
        raise AdapterError(f"no such folder: {folder}; set it to a LoRA adapter in PEFT's form, or its id on the hub")
    if not (folder / ADAPTER_CONFIG).is_file():
        raise AdapterError(f"{folder} has no {ADAPTER_CONFIG}: it is no adapter in PEFT's form")
    settings = _read_object(folder / ADAPTER_CONFIG)
    if (kind := settings.get("peft_type")) != "LORA":
        raise AdapterError(f"{folder} holds an adapter of type {kind}: only LORA is supported")
    for name in OTHER_FORMS:
        if settings.get(name):
            raise AdapterError(
                f"{folder} was trained with PEFT's {name}, which is not supported: merge it into its base"
            )
    if (bias := settings.get("bias", "none")) != "none":
        raise AdapterError(f"{folder} was trained with PEFT's bias={bias}: only none is supported")
    if (initial := settings.get("init_lora_weights")) not in KEEPS_BASE:
        raise AdapterError(
            f"{folder} was trained with init_lora_weights={initial}, which changes the base: merge it into its base, or "
            "convert it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise AdapterError(f"{folder / ADAPTER_CONFIG} has r {rank} and lora_alpha {alpha}: both must be positive")
    base, use_rslora = settings.get("base_model_name_or_path"), settings.get("use_rslora")
    shapes = _read_shapes(folder / ADAPTER_WEIGHTS, rank)
    return AdapterFiles(
        folder, rank, float(alpha), bool(use_rslora), str(base or ""), shapes, read_quantization_settings(folder)
    )


def read_quantization_settings(folder: Path) -> dict[str, Any] | None:
    """Return how an adapter's base is quantized; None without a file.

    Raises:
        AdapterError: a damaged file.
    """
    path = folder / QUANTIZATION_CONFIG
    return _read_object(path) if path.is_file() else None


def scale_differences(args: ModelArgs, files: AdapterFiles) -> Iterator[tuple[str, str, str]]:
    """Yield the keys of an adapter's rank and scale that differ, the run's value and the adapter's."""
    ours = {"lora_rank": args.lora_rank, "lora_alpha": args.adapter_alpha, "use_rslora": args.use_rslora}
    yield from ((key, _show(ours[key]), _show(value)) for key, value in files.scale_keys.items() if ours[key] != value)


def base_difference(args: ModelArgs, files: AdapterFiles) -> Iterator[tuple[str, str, str]]:
    """Yield the first key of the base's quantization that differs, the run's value and the adapter's."""
    theirs = files.quantization or {}
    for key, name in QUANTIZATION_KEYS.items():
        own, other = getattr(args, key) if args.load_in_4bit else None, theirs.get(name)
        if own != other:
            yield key, _show(own), _show(other)
            return


def _show(value: Any) -> str:
    """Return a value as YAML has it; of no quantization, false."""
    if value is None or isinstance(value, bool):
        return str(bool(value)).lower()
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        settings: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path} can't be read: {error}") from error
    if not isinstance(settings, dict):
        raise AdapterError(f"{path} is no JSON object")
    return cast(dict[str, Any], settings)


def _read_shapes(file: Path, rank: int) -> dict[str, tuple[int, int]]:
    if not file.is_file():
        raise AdapterError(f"{file.parent} has no {file.name}: save the adapter with PEFT's save_pretrained")
    try:
        with file.open("rb") as opened:
            header: dict[str, Any] = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise AdapterError(f"{file} can't be read: {error}") from error
    sizes: dict[str, dict[str, int]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        match, shape = FACTOR.fullmatch(name), entry["shape"]
        if match is None:
            raise AdapterError(f"{file} holds {name}: only pairs of lora_A and lora_B of linear layers are supported")
        is_down = match["factor"] == "lora_A"
        if len(shape) != 2 or shape[0 if is_down else 1] != rank:
            raise AdapterError(f"{name} in {file} has shape {shape}, and rank r is {rank}: only one rank is supported")
        sizes.setdefault(match["layer"], {})[match["factor"]] = shape[1 if is_down else 0]
    if single := [layer for layer, each in sizes.items() if len(each) < 2]:
        raise AdapterError(f"{file} has one factor alone of {single[0]}")
    if not sizes:
        raise AdapterError(f"{file} is empty")
    return {layer: (each["lora_A"], each["lora_B"]) for layer, each in sizes.items()}
