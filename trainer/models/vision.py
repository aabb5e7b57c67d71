"""Packed vision-language policy (Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, also as mixtures of experts).

Invariants: the trajectory locates images, as a policy may sample placeholder ids; with several processes, each pass
computes the vision tower, so that all exchange the same weights and gradients.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.services.chat.vision import ImageProcessor, stack_images
from offbeat.services.messages.types import PromptImage
from offbeat.trainer.models.packing import PackedInput, Packing
from offbeat.trainer.models.policy import PackedPolicy, packed_kwargs

Grid = tuple[int, int, int]
"""Frames, patch rows, patch columns."""
DEEP = "deep_features"
"""Argument on its way through a model."""


class ImageFeatures(NamedTuple):
    """Outputs of a vision tower. tokens: [T, H], in place of embeddings; deep: [T, H] each, added after the first layers."""

    tokens: Tensor
    deep: tuple[Tensor, ...] = ()


class PackedVisionPolicy(PackedPolicy):
    def __init__(self, model: PreTrainedModel, temperature: float, reader: ImageProcessor) -> None:
        super().__init__(model, temperature)
        self._reader = reader
        take_deep_features(model)

    def logits(self, x: PackedInput) -> Tensor:
        embedded = self.model.get_input_embeddings()(x.tokens[None])
        pixels = [self._reader.pixels(image.png) for image in x.images]
        kwargs = packed_kwargs(x.packing)
        if pixels:
            patches, grids = (torch.from_numpy(part).to(x.tokens.device) for part in stack_images(pixels))
            features = image_features(self.model, patches, grids)
            slots = torch.cat([torch.arange(p.start, p.start + p.count) for p in x.images]).to(x.tokens.device)
            if len(slots) != len(features.tokens):
                raise ValueError(f"{len(features.tokens)} image features for {len(slots)} image tokens")
            embedded = embedded.index_copy(1, slots, features.tokens[None].to(embedded.dtype))
            is_image = torch.zeros_like(x.tokens, dtype=torch.bool).index_fill(0, slots, value=True)
            kwargs |= deep_features(is_image[None], features)
        elif dist.is_initialized() and dist.get_world_size() > 1:
            features = image_features(self.model, *self._blank_image(x.tokens.device))
            embedded = embedded + sum(part.sum() for part in (features.tokens, *features.deep)) * 0.0
        kwargs["position_ids"] = rope_positions(x.packing, x.images, [p.grid for p in pixels], self._reader.merge)
        return self.model(inputs_embeds=embedded, logits_to_keep=x.predictors, **kwargs).logits[0]

    def _blank_image(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return patches and grid of one token."""
        vision, side = self.model.config.vision_config, self._reader.merge
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return torch.zeros(side * side, width, device=device), torch.tensor([[1, side, side]], device=device)


def image_features(model: Any, patches: Tensor, grids: Tensor) -> ImageFeatures:
    """Compute the tower of a model of transformers."""
    output = model.model.get_image_features(patches, grids, return_dict=True)
    deep = getattr(output, "deepstack_features", None) or ()  # Qwen3-VL's, arXiv:2406.04334
    return ImageFeatures(torch.cat(output.pooler_output), tuple(torch.cat(level) for level in deep))


def deep_features(is_image: Tensor, features: ImageFeatures) -> dict[str, Any]:
    """Return the argument for a model of `take_deep_features`. is_image: [B, N] bool"""
    return {DEEP: (is_image, list(features.deep))} if features.deep else {}


def take_deep_features(model: Any) -> None:
    """Let a model of transformers take them beside embeddings, of which it would find the images by token ids."""
    model.model.language_model.register_forward_pre_hook(_pass_deep_features, with_kwargs=True)


def _pass_deep_features(
    _: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if (deep := kwargs.pop(DEEP, None)) is not None:
        kwargs["visual_pos_masks"], kwargs["deepstack_visual_embeds"] = deep
    return inputs, kwargs


def rope_positions(packing: Packing, images: Sequence[PromptImage], grids: Sequence[Grid], merge: int) -> Tensor:
    """Return positions in the sequence, then M-RoPE's time, row and column (arXiv:2409.12191): [4, 1, N] int64.

    An image has one time; later text continues from its larger side. merge: patches per side of a token.
    """
    plain = packing.position_ids[0].cpu().numpy()
    axes = np.stack([plain, plain, plain, plain])
    borders = packing.cu_seqlens.cpu().numpy()
    for image, (_, patch_rows, patch_columns) in zip(images, grids, strict=True):
        rows, columns = patch_rows // merge, patch_columns // merge
        start, end = image.start, image.start + image.count
        stop = int(borders[np.searchsorted(borders, start, side="right")])
        origin = axes[1, start]
        axes[1, start:end] = origin
        axes[2, start:end] = origin + np.repeat(np.arange(rows), columns)
        axes[3, start:end] = origin + np.tile(np.arange(columns), rows)
        if end < stop:
            axes[1:, end:stop] += origin + max(rows, columns) - axes[1, end]
    return torch.from_numpy(axes)[:, None].to(packing.position_ids.device)
