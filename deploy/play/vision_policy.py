# pyright: basic
"""A vision-language policy on this machine's CPU.

Invariant: pixels and positions come from the learner's own code (`services.chat.vision`, `trainer.models.vision`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    DynamicCache,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils.logging import disable_progress_bar

from offbeat.deploy.play.policy import (
    PromptRequest,
    SamplingParams,
    completion_of,
    version_of,
)
from offbeat.services.chat.vision import PictureReader, stacked
from offbeat.services.messages.types import Completion
from offbeat.trainer.models.packing import Packing
from offbeat.trainer.models.vision import rope_positions


class VisionPolicy:
    """Completes prompts of text and images; see `offbeat.deploy.play.policy.Policy`."""

    def __init__(self, folder: Path, stop_ids: Sequence[int], *, seed: int) -> None:
        """Load the policy. Raises `RolloutError` if the folder has no image processor."""
        disable_progress_bar()
        self._reader = PictureReader(folder)
        self._model = AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True).float().eval()
        self._embed: Any = self._model.get_input_embeddings()
        self._stop_ids = torch.tensor(list(stop_ids))
        self._version = version_of(folder)
        torch.manual_seed(seed)

    @torch.inference_mode()
    def complete(self, asked: Sequence[PromptRequest], chance: SamplingParams) -> list[Completion]:
        """Complete prompts; a batch is padded on the left."""
        embedded, mask, positions, following = self._batch(asked)
        cache, draw = DynamicCache(config=self._model.config), _drawing(chance)
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        ended = torch.zeros(len(asked), dtype=torch.bool)
        most = torch.tensor([each.most for each in asked])
        while not ended.all():
            logits = self._model(
                inputs_embeds=embedded,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            drawn, logprob = draw(logits.float())
            tokens.append(drawn)
            logprobs.append(logprob)
            ended |= torch.isin(drawn, self._stop_ids) | (most <= len(tokens))
            embedded = self._embed(drawn[:, None])
            mask = torch.cat([mask, mask.new_ones(len(asked), 1)], dim=1)
            positions, following = following, following + 1
        rows = zip(torch.stack(tokens, dim=1).tolist(), torch.stack(logprobs, dim=1).tolist(), asked, strict=True)
        stop_ids = self._stop_ids.tolist()
        return [
            completion_of(ids[: each.most], values[: each.most], stop_ids, self._version) for ids, values, each in rows
        ]

    def _batch(self, asked: Sequence[PromptRequest]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a batch of B prompts: embeddings [B, N, D], mask [B, N], positions [4, B, N] and those of the next
        token [4, B, 1]."""
        longest = max(len(each.prompt) for each in asked)
        embedded = torch.zeros(len(asked), longest, self._embed.embedding_dim)
        mask = torch.zeros(len(asked), longest, dtype=torch.long)
        positions = torch.zeros(4, len(asked), longest + 1, dtype=torch.long)
        for row, each in enumerate(asked):
            start = longest - len(each.prompt)
            mask[row, start:] = 1
            embedded[row, start:], positions[:, row, start:] = self._read(each)
        return embedded, mask, positions[:, :, :-1], positions[:, :, -1:]

    def _read(self, asked: PromptRequest) -> tuple[Tensor, Tensor]:
        """Return a prompt's embeddings [N, D], with image features in place, and positions [4, N + 1]."""
        embedded = self._embed(torch.tensor(asked.prompt))
        pixels = [self._reader.pixels(picture.png) for picture in asked.pictures]
        if pixels:
            patches, grids = map(torch.from_numpy, stacked(pixels))
            seen = torch.cat(self._model.model.get_image_features(patches, grids, return_dict=True).pooler_output)
            places = torch.cat([torch.arange(p.start, p.start + p.count) for p in asked.pictures])
            embedded = embedded.index_copy(0, places, seen)
        packing = Packing.of(torch.tensor([0, len(asked.prompt) + 1]))
        grids = [each.grid for each in pixels]
        return embedded, rope_positions(packing, asked.pictures, grids, self._reader.merge)[:, 0]


def _drawing(chance: SamplingParams) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a function that maps logits [B, V] to sampled tokens [B] and their log-probabilities [B]."""
    warpers = LogitsProcessorList()
    if chance.temperature > 0:
        warpers.append(TemperatureLogitsWarper(chance.temperature))
        if chance.top_k > 0:
            warpers.append(TopKLogitsWarper(chance.top_k))
        if chance.top_p < 1:
            warpers.append(TopPLogitsWarper(chance.top_p))

    def draw(logits: Tensor) -> tuple[Tensor, Tensor]:
        warped = cast(Any, warpers)(None, logits).log_softmax(dim=-1)
        tokens = torch.multinomial(warped.exp(), 1)[:, 0] if chance.temperature > 0 else warped.argmax(dim=-1)
        return tokens, warped.gather(-1, tokens[:, None])[:, 0]

    return draw
