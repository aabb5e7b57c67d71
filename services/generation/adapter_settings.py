"""Settings of a published adapter (PEFT's `adapter_config.json`)."""

import json
import math
from pathlib import Path

SETTINGS = "adapter_config.json"


def read_scaling(folder: Path) -> float:
    """Return the scale of the product B A."""
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    rank = settings["r"]
    return settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank)
