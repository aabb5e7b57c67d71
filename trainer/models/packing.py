"""Where sequences lie in one packed row of tokens, and what a model reads of them.

Linear layers see no padding; attention alone may pad.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.services.messages.types import Picture
from offbeat.trainer.models.divergence import ReferenceStates
from offbeat.trainer.models.prefix_attention import SharedPrefixLayout, position_ids


@dataclass(frozen=True, slots=True)
class Packing:
    """B sequences laid end to end in N tokens.

    cu_seqlens: [B + 1] int32, first 0, last N; position_ids: [1, N] int64, from 0 in each sequence;
    slots: [N] int64, each token's place in a right-padded [B, max_len]; branches: where some of the sequences go on from a
    common beginning, in blocks of which the other fields tell, or None.
    """

    cu_seqlens: Tensor
    position_ids: Tensor
    slots: Tensor
    max_len: int
    branches: SharedPrefixLayout | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @classmethod
    def of(cls, cu_seqlens: Tensor, parents: Tensor | None = None) -> "Packing":
        """Lay out sequences by their borders: [B + 1] int, on any device. parents: as in `SharedPrefixLayout.of`.

        Raises:
            ValueError: the borders do not start at 0 or do not grow.
        """
        starts = cu_seqlens.to(torch.int64)
        lengths = starts.diff()
        if len(starts) < 2 or int(starts[0]) != 0 or int(lengths.min()) < 1:
            raise ValueError(f"not the borders of packed sequences: {starts.tolist()}")
        num_tokens, max_len = int(starts[-1]), int(lengths.max())
        positions = torch.arange(num_tokens, device=starts.device) - starts[:-1].repeat_interleave(lengths)
        rows = torch.arange(len(lengths), device=starts.device).repeat_interleave(lengths)
        slots = rows * max_len + positions
        if parents is None:
            return cls(starts.to(torch.int32), positions[None], slots, max_len)
        return cls(
            starts.to(torch.int32),
            position_ids(starts, parents),
            slots,
            max_len,
            SharedPrefixLayout.of(starts, parents),
        )


@dataclass(frozen=True, slots=True)
class PackedInput:
    """What one forward pass reads, and which tokens it is asked about.

    tokens: [N] int64; positions: [M] int64, indexes into tokens, none of them a sequence's first; temperatures: [M] float32
    that the tokens at `positions` were sampled at, NaN where the model's own was, or None where it was for all; anchor: what
    a reference says at `positions`, where the KL to it over the whole vocabulary is wanted; pictures: by their places in
    tokens, in order; head_alone: whether values owe nothing to the policy that they are read off.
    """

    tokens: Tensor
    packing: Packing
    positions: Tensor
    temperatures: Tensor | None = None
    anchor: ReferenceStates | None = None
    pictures: tuple[Picture, ...] = ()
    head_alone: bool = False

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        cu_seqlens: Tensor,
        positions: Tensor,
        temperatures: Tensor | None = None,
        pictures: tuple[Picture, ...] = (),
        parents: Tensor | None = None,
    ) -> "PackedInput":
        """Raises ValueError as `Packing.of`, or when a sequence's first token is asked about."""
        packing = Packing.of(cu_seqlens, parents)
        if len(tokens) != packing.position_ids.shape[1]:
            raise ValueError(f"{len(tokens)} tokens, {packing.position_ids.shape[1]} announced")
        if bool((packing.position_ids[0, positions] == 0).any()):
            raise ValueError("no logit predicts a sequence's first token")
        return cls(tokens, packing, positions, temperatures, pictures=pictures)

    @property
    def predictors(self) -> Tensor:
        """[M] int64: the places whose logits are of the tokens at `positions`."""
        branches = self.packing.branches
        return self.positions - 1 if branches is None else branches.before[self.positions]

    def to(self, device: torch.device) -> "PackedInput":
        if self.tokens.device == device:
            return self
        packing = Packing(
            self.packing.cu_seqlens.to(device),
            self.packing.position_ids.to(device),
            self.packing.slots.to(device),
            self.packing.max_len,
            None if self.packing.branches is None else self.packing.branches.to(device),
        )
        temperatures = None if self.temperatures is None else self.temperatures.to(device)
        anchor = None if self.anchor is None else ReferenceStates(self.anchor.hidden.to(device), self.anchor.head)
        tokens, positions = self.tokens.to(device), self.positions.to(device)
        return PackedInput(tokens, packing, positions, temperatures, anchor, self.pictures, self.head_alone)
