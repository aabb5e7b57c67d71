# pyright: basic
"""Image preprocessing on NumPy and Pillow; pixels of engine and learner are bitwise equal."""

import io
import json
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from offbeat.services.chat.image_files import MALFORMED
from offbeat.services.errors import RolloutError

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Supported `model_type`s."""
TEXT_UNLESS_ASKED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families that are trained on text, without their encoder of images, unless `image_input` is set."""
IMAGE_INPUT_ADVICE = (
    f"set tiny.vision to {{}}, or pretrain to a folder of {', '.join(FAMILIES)}, and for {' or '.join(TEXT_UNLESS_ASKED)} "
    "actor_train.model_args.image_input to true"
)
"""What gives a policy image input."""
MAX_CACHED_IMAGES = 32
"""Up to 20 MB each."""
MAX_CACHED_COUNTS = 16_384
"""By image digest."""


class Pixels(NamedTuple):
    """patches: [h * w, channels * frames * side**2] float32; grid: (1, h, w)."""

    patches: npt.NDArray[np.float32]
    grid: tuple[int, int, int]


def model_family(folder: Path) -> str | None:
    try:
        family = json.loads((folder / "config.json").read_text()).get("model_type")
    except (OSError, ValueError):
        return None
    return family if family in FAMILIES else None


def reads_images(folder: Path, image_input: bool | None) -> bool:
    """Return whether a folder's policy has image input. image_input: of the configuration."""
    family = model_family(folder)
    return family is not None and (family not in TEXT_UNLESS_ASKED or bool(image_input))


class ImageProcessor:
    def __init__(self, folder: Path) -> None:
        """Raises RolloutError without image support or defined preprocessing."""
        if model_family(folder) is None:
            raise RolloutError(f"{folder} is no supported vision-language model: use one of {', '.join(FAMILIES)}")
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        try:
            # By name: transformers would choose by whether torchvision is there, and the other class resizes otherwise.
            self._processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise RolloutError(f"{folder} has no image preprocessing: {error}") from error
        config = json.loads((folder / "config.json").read_text())
        self.image_token_id = int(config["image_token_id"])
        self.merge = int(config["vision_config"].get("spatial_merge_size", 2))
        self.pixels = lru_cache(MAX_CACHED_IMAGES)(self._pixels)
        self._counts: dict[bytes, int] = {}

    def count(self, png: bytes) -> int:
        """Count tokens; thread-safe. Raises ValueError for an unreadable image."""
        digest = blake2b(png, digest_size=16).digest()
        count = self._counts.get(digest)
        if count is None:
            _, height, width = self.pixels(png).grid
            count = height * width // self.merge**2
            if len(self._counts) >= MAX_CACHED_COUNTS:
                self._counts.clear()
            self._counts[digest] = count
        return count

    def _pixels(self, png: bytes) -> Pixels:
        from PIL import Image

        try:
            image = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
        except MALFORMED as error:
            raise ValueError(f"an image that can't be read: {error or type(error).__name__}") from error
        features = self._processor(images=[image], return_tensors="np")
        frames, height, width = (int(n) for n in features["image_grid_thw"][0])
        return Pixels(np.ascontiguousarray(features["pixel_values"], dtype=np.float32), (frames, height, width))


def encode_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Encode [height, width, 3] uint8. Raises ValueError for other arrays."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(f"a frame of {pixels.dtype} {pixels.shape}, not of uint8 [height, width, 3]")
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG", compress_level=1)
    return out.getvalue()


def stack_images(pixels: Sequence[Pixels]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Concatenate patches [P, D] float32 and grids [I, 3] int64."""
    return (
        np.concatenate([image.patches for image in pixels]),
        np.array([image.grid for image in pixels], dtype=np.int64),
    )
