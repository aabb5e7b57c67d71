"""Tiny policies of families with recurrent layers, as folders and as transformers' models."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.families import CHANGES, QWEN_VISION, SIZES, write_family

TEXT = {
    "vocab_size": 128,
    "max_position_embeddings": 1024,
    "head_dim": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""vLLM's gated delta rule on a CPU takes few head sizes."""
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
    "partial_rotary_factor": 0.25,
}
VISION_TOKENS = ("image", "video", "vision_start", "vision_end")


def write_hybrid(folder: Path, kind: str = "qwen3_5_text", **changes: Any) -> Path:
    """Write a model's `config.json`; `qwen3_5` is the multimodal one."""
    if kind == "qwen3_5":
        text = SIZES | CHANGES["qwen3_5_text"] | TEXT | {"rope_parameters": ROPE} | changes
        ids: dict[str, Any] = {f"{name}_token_id": 3 + number for number, name in enumerate(VISION_TOKENS)}
        ids |= {"tie_word_embeddings": changes.get("tie_word_embeddings", False)}
        AutoConfig.for_model(kind, text_config=text, vision_config=QWEN_VISION, **ids).save_pretrained(folder)
    else:
        kept = {key: value for key, value in TEXT.items() if "linear" not in key or "lfm" not in kind}
        write_family(folder, kind, **kept | changes)
    model = _class_of(folder).from_config(AutoConfig.from_pretrained(folder))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [type(model).__name__]}))
    return folder


def random_hybrid(folder: Path, seed: int, scale: float = 0.2) -> Any:
    """Return the folder's model with weights of this seed, float32."""
    torch.manual_seed(seed)
    model = _class_of(folder).from_config(AutoConfig.from_pretrained(folder)).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, scale)
    return model


def _class_of(folder: Path) -> Any:
    is_multimodal = "vision_config" in json.loads((folder / "config.json").read_text())
    return AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
