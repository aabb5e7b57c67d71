"""KV cache of many episodes, kept across turns.

Slot s holds keys and values of its episode's first `lengths[s]` tokens. Nothing is copied if all slots are fed.
"""

# pyright: basic
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _Fed:
    def __init__(self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        self.width, self.total = max(counts), max(s + c for s, c in zip(starts, counts, strict=True))
        first, n = slots[0], len(slots)
        self.start = starts[0]
        together = list(slots) == list(range(first, first + n))
        self.contiguous = slice(first, first + n) if together and len(set(starts)) == len(set(counts)) == 1 else None
        self.slots = torch.tensor(slots)
        offset = torch.arange(self.width) - (self.width - torch.tensor(counts)).unsqueeze(1)
        # [n, width]; chunks are padded on the left, so that the last column is real everywhere
        self.positions = (torch.tensor(starts).unsqueeze(1) + offset).clamp(min=0)
        if self.contiguous is None:
            self.row, self.column = torch.nonzero(offset >= 0, as_tuple=True)
            self.to_slot, self.to_position = self.slots[self.row], self.positions[self.row, self.column]

    @property
    def mask(self) -> Tensor:
        """Return the attention mask, [n, 1, width, total] bool."""
        return torch.arange(self.total) <= self.positions[:, None, :, None]


class _StoreLayer(CacheLayerMixin):
    """Keys and values, [slot, head, token, dimension]."""

    fed: _Fed

    def __init__(self, num_slots: int, length: int) -> None:
        super().__init__()
        self._shape = num_slots, length

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        num_slots, length = self._shape
        for name, of in (("keys", key_states), ("values", value_states)):
            setattr(self, name, of.new_zeros(num_slots, of.shape[1], length, of.shape[3]))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        return self._append(self.keys, key_states), self._append(self.values, value_states)

    def _append(self, store: Tensor, new: Tensor) -> Tensor:
        fed = self.fed
        if fed.contiguous is not None:
            store[fed.contiguous, :, fed.start : fed.total] = new
            return store[fed.contiguous, :, : fed.total]
        store[fed.to_slot, :, fed.to_position] = new[fed.row, :, fed.column]
        return store[:, :, : fed.total].index_select(0, fed.slots)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        del query_length
        return self.fed.total, 0

    def get_seq_length(self) -> int:
        return self.fed.total - self.fed.width

    def get_max_length(self) -> int:
        return self._shape[1]


class Store:
    def __init__(self, model: Any, num_slots: int, length: int) -> None:
        self.model = model
        self._layers = [_StoreLayer(num_slots, length) for _ in range(model.config.num_hidden_layers)]
        self._cache = Cache(layers=[*self._layers])
        self.lengths = [0] * num_slots

    def feed(self, slots: Sequence[int], chunks: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens to slots, in ascending order; return next-token logits, [slots, vocabulary]."""
        fed = _Fed(slots, [self.lengths[slot] for slot in slots], [len(chunk) for chunk in chunks])
        for layer in self._layers:
            layer.fed = fed
        ids = torch.tensor([[0] * (fed.width - len(chunk)) + list(chunk) for chunk in chunks])
        output = self.model(
            input_ids=ids,
            attention_mask=fed.mask,
            position_ids=fed.positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        for slot, chunk in zip(slots, chunks, strict=True):
            self.lengths[slot] += len(chunk)
        return output.logits[:, -1].float()

    def copy(self, source: int, targets: Sequence[int]) -> None:
        length = self.lengths[source]
        for layer in self._layers:
            for cache in (layer.keys, layer.values):
                assert cache is not None
                cache[list(targets), :, :length] = cache[source, :, :length].clone()
        for target in targets:
            self.lengths[target] = length

    def clear(self) -> None:
        self.lengths = [0] * len(self.lengths)
