"""LoRA adapters in PEFT's form: its names, and the scale that its settings imply."""

import json
import math
from pathlib import Path

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
QUANTIZATION_CONFIG = "quantization_config.json"
"""How an adapter's base is quantized, as transformers' `BitsAndBytesConfig` has it."""
PREFIX = "base_model.model."
"""Of the names of factors."""


def read_scaling(folder: Path) -> float:
    """Return the scale of the product B A."""
    settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    rank = settings["r"]
    return settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank)
