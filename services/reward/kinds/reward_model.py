# pyright: basic
"""Scores of a sequence-classification model.

Invariant: a conversation's score does not depend on its batch, up to rounding.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import AutoConfig, AutoModelForSequenceClassification

from offbeat.services.chat.tokenizer import load_tokenizer
from offbeat.services.errors import RolloutError
from offbeat.services.reward.errors import Failure, RewardError
from offbeat.services.reward.kinds.model_config import RewardModelConfig
from offbeat.services.reward.sample import RewardSample, final_text, text_of

logger = logging.getLogger(__name__)

UNBOUNDED_LENGTH = 1_000_000
"""Maximum of tokenizers without one exceeds it."""


class RewardModel:
    def __init__(self, config: RewardModelConfig) -> None:
        """Load the model; raises ValueError."""
        self._config = config
        self._scorer = ConversationScorer(config)
        self._thread = ThreadPoolExecutor(1, "reward-model")
        self._waiting: list[tuple[list[int], asyncio.Future[float]]] = []
        self._batching: asyncio.Task[None] | None = None

    async def score(self, sample: RewardSample) -> float:
        loop = asyncio.get_running_loop()
        tokens = await loop.run_in_executor(None, self._scorer.tokenize, sample)
        future: asyncio.Future[float] = loop.create_future()
        self._waiting.append((tokens, future))
        if self._batching is None or self._batching.done():
            self._batching = asyncio.create_task(self._score_waiting())
        return await future

    async def close(self) -> None:
        if self._batching is not None:
            self._batching.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _score_waiting(self) -> None:
        while self._waiting:
            batch = self._take_batch()
            try:
                loop = asyncio.get_running_loop()
                scores = await loop.run_in_executor(self._thread, self._scorer.score, [tokens for tokens, _ in batch])
            except Exception as error:  # each caller gets it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():
                    future.set_result(score)

    def _take_batch(self) -> list[tuple[list[int], asyncio.Future[float]]]:
        """Take those still waited for, first come first served, within the token limit."""
        self._waiting = [each for each in self._waiting if not each[1].done()]
        batch: list[tuple[list[int], asyncio.Future[float]]] = []
        longest = 0
        while self._waiting:
            longest = max(longest, len(self._waiting[0][0]))
            if batch and longest * (len(batch) + 1) > self._config.max_batch_tokens:
                break
            batch.append(self._waiting.pop(0))
        return batch


class ConversationScorer:
    def __init__(self, config: RewardModelConfig) -> None:
        """Raises ValueError if the folder holds no such model."""
        folder = config.model_folder
        if not folder.is_dir():
            raise ValueError(f"reward {config.name!r}: model_args.model_name_or_path: no such folder: {folder}")
        try:
            self._tokenizer: Any = load_tokenizer(folder)
            model = _load_model(config)
        except (RolloutError, OSError, ValueError, RuntimeError, ImportError) as error:
            raise ValueError(f"reward {config.name!r}: {folder} can't be loaded: {error}") from error
        if self._tokenizer.chat_template is None:
            raise ValueError(f"reward {config.name!r}: the tokenizer of {folder} has no chat template")
        self._model = model.to(config.device).eval()
        self._label = config.label
        self._includes_thoughts = config.includes_thoughts
        self._device = config.device
        self._max_length = config.max_length or _max_length(self._tokenizer, model)

    def tokenize(self, sample: RewardSample) -> list[int]:
        """Raises RewardError if the template refuses the conversation."""
        response = sample.response if self._includes_thoughts else final_text(sample.response)
        messages = [*map(_without_images, sample.prompt), {"role": "assistant", "content": response}]
        try:
            tokens = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise RewardError(
                Failure.BAD_ROW, f"the model's chat template refuses the conversation: {error}"
            ) from error
        return tokens[-self._max_length :]

    @torch.inference_mode()
    def score(self, batch: Sequence[Sequence[int]]) -> list[float]:
        lengths = torch.tensor([len(tokens) for tokens in batch], device=self._device)
        longest = int(lengths.max())
        padded = [[*tokens, *([0] * (longest - len(tokens)))] for tokens in batch]
        ids = torch.tensor(padded, device=self._device)
        mask = (torch.arange(longest, device=self._device) < lengths[:, None]).long()
        return self._logits(ids, mask, lengths)[:, self._label].float().tolist()

    def _logits(self, ids: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        head = getattr(self._model, "score", None)
        if head is None:  # encoders read their first token
            return self._model(input_ids=ids, attention_mask=mask).logits
        # The model itself would look for the last token that is not padding, which an end token used as padding hides
        backbone = getattr(self._model, self._model.base_model_prefix)
        hidden = backbone(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return head(hidden[torch.arange(len(ids), device=hidden.device), lengths - 1])


def _without_images(message: Mapping[str, Any]) -> dict[str, Any]:
    content: Any = message.get("content")
    return {**message, "content": text_of(content)} if isinstance(content, list | tuple) else dict(message)


def _load_model(config: RewardModelConfig) -> Any:
    """Load the model with the head of its file; raises ValueError if that has none, or too few labels."""
    folder, args = config.model_folder, config.model_args
    num_labels = int(AutoConfig.from_pretrained(folder, trust_remote_code=False).num_labels or 0)
    if config.label >= num_labels:
        raise ValueError(f"label {config.label}: the model has {num_labels} label(s)")
    model, info = AutoModelForSequenceClassification.from_pretrained(
        folder,
        dtype=getattr(torch, args.dtype),
        attn_implementation=None if args.attn_implementation == "auto" else args.attn_implementation,
        output_loading_info=True,
        trust_remote_code=False,
        use_safetensors=True,
    )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"its weights lack {', '.join(missing[:3])}: it is no trained reward model")
    return model


def _max_length(tokenizer: Any, model: Any) -> int:
    limits = (tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None))
    return min((int(limit) for limit in limits if limit and limit < UNBOUNDED_LENGTH), default=UNBOUNDED_LENGTH)
