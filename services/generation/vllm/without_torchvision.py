"""vLLM's models whose modules need torchvision for images, on text where it is missing.

Invariant: where torchvision is installed, vLLM's own registry stands.
"""

# pyright: basic
import json
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PILLOW = "ImageProcessorPil"
MODULES = {
    "Qwen3_5ForCausalLM": ("qwen3_5", "qwen2_vl"),
    "Qwen3_5MoeForCausalLM": ("qwen3_5", "qwen2_vl"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "qwen2_vl"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5", "qwen2_vl"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "qwen2_vl"),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", "qwen2_vl"),
    "Gemma3ForConditionalGeneration": ("gemma3_mm", "gemma3"),
    "Mistral3ForConditionalGeneration": ("mistral3", "pixtral"),
}
"""vLLM's modules by architecture, and the families of transformers whose image processing they import."""


def is_torchvision_missing() -> bool:
    return find_spec("torchvision") is None


def replace_image_processing(family: str) -> None:
    """Give vLLM's modules the names that they import from a module which can't be imported without torchvision."""
    module = f"transformers.models.{family}.image_processing_{{}}{family}"
    pillow = import_module(module.format("pil_"))
    for name in [name for name in vars(pillow) if name.endswith(PILLOW)]:
        vars(pillow).setdefault(name.removesuffix("Pil"), getattr(pillow, name))
    sys.modules.setdefault(module.format(""), pillow)


def __getattr__(name: str) -> Any:
    """Import a model by its architecture, as vLLM's registry does where one is first needed."""
    if name not in MODULES:
        raise AttributeError(name)
    module, family = MODULES[name]
    if is_torchvision_missing():
        replace_image_processing(family)
    return getattr(import_module(f"vllm.model_executor.models.{module}"), name)


def register_lazily() -> None:
    """Register the models in a worker, whose configuration was read in another process."""
    if is_torchvision_missing():
        for name in MODULES:
            import_module("vllm").ModelRegistry.register_model(name, f"{__name__}:{name}")


def register_model(folder: Path) -> None:
    """Import a folder's model, if it is one of these: vLLM would do so in a process without the replacement."""
    for name in json.loads((folder / "config.json").read_text()).get("architectures") or ():
        if name in MODULES and is_torchvision_missing():
            import_module("vllm").ModelRegistry.register_model(name, __getattr__(name))
