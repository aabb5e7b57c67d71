# pyright: basic
"""Vision-language policy on the CPU.

Invariant: pixels and positions come from the learner's code.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, DynamicCache
from transformers.utils.logging import disable_progress_bar

from offbeat.deploy.play.policy import (
    PromptRequest,
    SamplingParams,
    build_completion,
    parse_version,
)
from offbeat.deploy.play.token_sampling import make_warpers
from offbeat.services.chat.vision import ImageProcessor, stack_images
from offbeat.services.messages.types import Completion
from offbeat.trainer.models.packing import Packing
from offbeat.trainer.models.vision import deep_features, image_features, rope_positions, take_deep_features


class VisionPolicy:
    def __init__(self, folder: Path, stop_ids: Sequence[int], *, seed: int) -> None:
        """Load the policy; raises `RolloutError` without an image processor."""
        disable_progress_bar()
        self._reader = ImageProcessor(folder)
        self._model = (
            AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            .float()
            .eval()
        )
        take_deep_features(self._model)
        self._embed: Any = self._model.get_input_embeddings()
        self._stop_ids = torch.tensor(list(stop_ids))
        self._version = parse_version(folder)
        torch.manual_seed(seed)

    @torch.inference_mode()
    def complete(self, requests: Sequence[PromptRequest], params: SamplingParams) -> list[Completion]:
        embedded, mask, positions, following, deep = self._batch(requests)
        cache, draw = DynamicCache(config=self._model.config), _make_token_sampler(params)
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        ended = torch.zeros(len(requests), dtype=torch.bool)
        max_tokens = torch.tensor([request.max_tokens for request in requests])
        while not ended.all():
            logits = self._model(
                inputs_embeds=embedded,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                **deep,
            ).logits[:, -1]
            drawn, logprob = draw(logits.float())
            tokens.append(drawn)
            logprobs.append(logprob)
            ended |= torch.isin(drawn, self._stop_ids) | (max_tokens <= len(tokens))
            embedded = self._embed(drawn[:, None])
            mask = torch.cat([mask, mask.new_ones(len(requests), 1)], dim=1)
            positions, following = following, following + 1
            deep = {}
        rows = zip(torch.stack(tokens, dim=1).tolist(), torch.stack(logprobs, dim=1).tolist(), requests, strict=True)
        stop_ids = self._stop_ids.tolist()
        return [
            build_completion(ids[: request.max_tokens], values[: request.max_tokens], stop_ids, self._version)
            for ids, values, request in rows
        ]

    def _batch(self, requests: Sequence[PromptRequest]) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Return embeddings [B, N, D], mask [B, N], positions [4, B, N], next positions [4, B, 1], and the argument of
        `deep_features`; left-padded.
        """
        longest = max(len(request.prompt) for request in requests)
        embedded = torch.zeros(len(requests), longest, self._embed.embedding_dim)
        mask, is_image = (torch.zeros(len(requests), longest, dtype=dtype) for dtype in (torch.long, torch.bool))
        positions = torch.zeros(4, len(requests), longest + 1, dtype=torch.long)
        pixels = [[self._reader.pixels(image.png) for image in request.images] for request in requests]
        for row, request in enumerate(requests):
            start, grids = longest - len(request.prompt), [image.grid for image in pixels[row]]
            mask[row, start:] = 1
            embedded[row, start:] = self._embed(torch.tensor(request.prompt))
            packing = Packing.of(torch.tensor([0, len(request.prompt) + 1]))
            positions[:, row, start:] = rope_positions(packing, request.images, grids, self._reader.merge)[:, 0]
            for image in request.images:
                is_image[row, start + image.start : start + image.start + image.count] = True
        deep: dict[str, Any] = {}
        if images := [image for row in pixels for image in row]:  # in the order of the mask
            features = image_features(self._model, *map(torch.from_numpy, stack_images(images)))
            embedded[is_image] = features.tokens
            deep = deep_features(is_image, features)
        return embedded, mask, positions[:, :, :-1], positions[:, :, -1:], deep


def _make_token_sampler(params: SamplingParams) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a function: logits [B, V] -> tokens [B], log-probabilities [B]."""
    warpers = make_warpers(*params)

    def draw(logits: Tensor) -> tuple[Tensor, Tensor]:
        warped = cast(Any, warpers)(None, logits).log_softmax(dim=-1)
        tokens = torch.multinomial(warped.exp(), 1)[:, 0] if params.temperature > 0 else warped.argmax(dim=-1)
        return tokens, warped.gather(-1, tokens[:, None])[:, 0]

    return draw
