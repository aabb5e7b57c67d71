"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 and the mixtures of these for vLLM, fed with preprocessed pixels and expanded
placeholders.

Invariant: vision tower outputs of one version are never reused under another.
"""

# pyright: basic
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offbeat.services.generation.vllm.without_torchvision import is_torchvision_missing, replace_image_processing

if is_torchvision_missing():
    replace_image_processing("qwen2_vl")

from vllm import ModelRegistry
from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.model_executor.models import qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_vl, qwen3_vl_moe
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

from offbeat.services.chat.vision import ImageProcessor, stack_images
from offbeat.services.messages.types import GenerateRequest

IMAGE = "image"


class ImageLimits:
    """Mixin of limits for vLLM's memory planning."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {IMAGE: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        del mm_counts
        return {IMAGE: seq_len}


class Qwen2Sizes(ImageLimits, qwen2_vl.Qwen2VLProcessingInfo):
    """Limits of Qwen2-VL and Qwen2.5-VL."""


class Qwen3Sizes(ImageLimits, qwen3_vl.Qwen3VLProcessingInfo):
    """Limits of Qwen3-VL."""


class Qwen3MoeSizes(ImageLimits, qwen3_vl_moe.Qwen3VLMoeProcessingInfo):
    """Limits of Qwen3-VL's mixtures of experts."""


class Qwen35Sizes(ImageLimits, qwen3_5.Qwen3_5ProcessingInfo):
    """Limits of Qwen3.5."""


class Qwen35MoeSizes(ImageLimits, qwen3_5.Qwen3_5MoeProcessingInfo):
    """Limits of Qwen3.5's mixtures of experts."""


class NoProcessing(qwen2_vl.Qwen2VLMultiModalProcessor):
    """Unused processor: requests carry pixels."""

    requires_tokenizer = False

    def get_dummy_mm_inputs(self, mm_counts: Mapping[str, int], **_: Any) -> MultiModalInput:
        del mm_counts
        return mm_input([], MultiModalKwargsItems({}), {}, {})


def takes_pixels(sizes: Any) -> Any:
    """Return a decorator of models. sizes: class of their limits."""
    return MULTIMODAL_REGISTRY.register_processor(
        NoProcessing, info=sizes, dummy_inputs=qwen2_vl.Qwen2VLDummyInputsBuilder
    )


@takes_pixels(Qwen2Sizes)
class Qwen2VL(qwen2_vl.Qwen2VLForConditionalGeneration):
    """vLLM's model."""


@takes_pixels(Qwen2Sizes)
class Qwen25VL(qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):
    """vLLM's model."""


@takes_pixels(Qwen3Sizes)
class Qwen3VL(qwen3_vl.Qwen3VLForConditionalGeneration):
    """vLLM's model."""


@takes_pixels(Qwen3MoeSizes)
class Qwen3VLMoe(qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration):
    """vLLM's model."""


@takes_pixels(Qwen35Sizes)
class Qwen35(qwen3_5.Qwen3_5ForConditionalGeneration):
    """vLLM's model."""


@takes_pixels(Qwen35MoeSizes)
class Qwen35Moe(qwen3_5.Qwen3_5MoeForConditionalGeneration):
    """vLLM's model."""


def register() -> None:
    """Replace vLLM's own models."""
    ModelRegistry.register_model("Qwen2VLForConditionalGeneration", Qwen2VL)
    ModelRegistry.register_model("Qwen2_5_VLForConditionalGeneration", Qwen25VL)
    ModelRegistry.register_model("Qwen3VLForConditionalGeneration", Qwen3VL)
    ModelRegistry.register_model("Qwen3VLMoeForConditionalGeneration", Qwen3VLMoe)
    ModelRegistry.register_model("Qwen3_5ForConditionalGeneration", Qwen35)
    ModelRegistry.register_model("Qwen3_5MoeForConditionalGeneration", Qwen35Moe)


class PromptMaker:
    def __init__(self, model: Path) -> None:
        """Raises RolloutError if the model reads no images."""
        self._reader = ImageProcessor(model)
        self._fields = qwen2_vl._create_qwen2vl_field_factory(self._reader.merge)

    def __call__(self, request: GenerateRequest, salt: str, *, share_prefixes: bool) -> MultiModalInput:
        """Return a request's input; different salts share no cached images nor, with `share_prefixes`, tokens.

        Raises:
            ValueError: an image is unreadable, or takes another number of tokens.
        """
        pixels = [self._reader.pixels(image.png) for image in request.images]
        for image in request.images:
            if image.count != (real := self._reader.count(image.png)):
                raise ValueError(f"an image of {real} tokens is given {image.count}")
        patches, grids = stack_images(pixels)
        read: Any = {"pixel_values": torch.from_numpy(patches), "image_grid_thw": torch.from_numpy(grids)}
        places = [PlaceholderRange(offset=image.start, length=image.count) for image in request.images]
        return mm_input(
            list(request.prompt),
            MultiModalKwargsItems.from_hf_inputs(read, self._fields(read)),
            {IMAGE: [f"{salt}-{image.digest}" for image in request.images]},
            {IMAGE: places},
            cache_salt=salt if share_prefixes else None,
        )
