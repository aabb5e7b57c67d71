from collections.abc import Mapping
from typing import Any


def find_obstacle(architecture: Mapping[str, Any], size: int) -> str:
    """Return why a model can't be split over `size` processes, or "". architecture: `config.json` of the text model."""
    heads = architecture.get("num_attention_heads")
    counts = {
        "num_attention_heads": heads,
        "num_key_value_heads": architecture.get("num_key_value_heads") or heads,
        "intermediate_size": architecture.get("intermediate_size"),
    }
    for key, count in counts.items():
        if isinstance(count, int) and count % size:
            return f"the model's {key}, {count}, is not a multiple of it"
    return ""
