"""Packed vision-language policy (Qwen2-VL, Qwen2.5-VL).

Invariants: the trajectory locates images, as a policy may sample placeholder ids; with several processes, each pass
computes the vision tower, so that all exchange the same weights and gradients.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.services.chat.vision import ImageProcessor, stack_images
from offbeat.services.messages.types import PromptImage
from offbeat.trainer.models.packing import PackedInput, Packing
from offbeat.trainer.models.policy import PackedPolicy, packed_kwargs

Grid = tuple[int, int, int]
"""Frames, patch rows, patch columns."""


class PackedVisionPolicy(PackedPolicy):
    def __init__(self, model: PreTrainedModel, temperature: float, reader: ImageProcessor) -> None:
        super().__init__(model, temperature)
        self._reader = reader

    def logits(self, x: PackedInput) -> Tensor:
        embedded = self.model.get_input_embeddings()(x.tokens[None])
        pixels = [self._reader.pixels(image.png) for image in x.images]
        if pixels:
            patches, grids = (torch.from_numpy(part).to(x.tokens.device) for part in stack_images(pixels))
            features = self._features(patches, grids)
            slots = torch.cat([torch.arange(p.start, p.start + p.count) for p in x.images]).to(x.tokens.device)
            if len(slots) != len(features):
                raise ValueError(f"{len(features)} image features for {len(slots)} image tokens")
            embedded = embedded.index_copy(1, slots, features[None].to(embedded.dtype))
        elif dist.is_initialized() and dist.get_world_size() > 1:
            embedded = embedded + self._features(*self._blank_image(x.tokens.device)).sum() * 0.0
        positions = rope_positions(x.packing, x.images, [image.grid for image in pixels], self._reader.merge)
        kwargs = {**packed_kwargs(x.packing), "position_ids": positions}
        return self.model(inputs_embeds=embedded, logits_to_keep=x.predictors, **kwargs).logits[0]

    def _features(self, patches: Tensor, grids: Tensor) -> Tensor:
        model: Any = self.model.model
        return torch.cat(model.get_image_features(patches, grids, return_dict=True).pooler_output)

    def _blank_image(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return patches and grid of one token."""
        vision, side = self.model.config.vision_config, self._reader.merge
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return torch.zeros(side * side, width, device=device), torch.tensor([[1, side, side]], device=device)


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
