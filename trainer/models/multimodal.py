# pyright: basic
"""Multimodal models that are trained on text: loaded whole, so that checkpoints and engines have all of their weights.

Invariant: what is no part of the language model, its towers, is frozen and never computed.
"""

import json
from pathlib import Path
from typing import Any

from torch import nn

TRAINED_ON_TEXT = ("gemma3", "mistral3", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
"""Tested `model_type`s."""


def is_trained_on_text(folder: Path) -> bool:
    """Return whether a folder has a multimodal model whose language model is trained."""
    try:
        return json.loads((folder / "config.json").read_text()).get("model_type") in TRAINED_ON_TEXT
    except (OSError, ValueError):
        return False


def towers(model: nn.Module) -> list[nn.Module]:
    """Return the modules beside the language model, such as the encoder of images; none of a text model."""
    base: Any = getattr(model, "base_model", model)
    if not hasattr(base, "language_model"):
        return []
    return [child for child in base.children() if child is not base.language_model]


def freeze_towers(model: nn.Module) -> None:
    for tower in towers(model):
        tower.requires_grad_(False)
