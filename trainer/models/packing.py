from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offbeat.services.messages.types import PromptImage
from offbeat.trainer.models.distillation import Distillation, TopQuery
from offbeat.trainer.models.divergence import ReferenceStates
from offbeat.trainer.models.tree_attention import TreeLayout


@dataclass(frozen=True, slots=True)
class Packing:
    """B sequences (with `tree`, blocks) concatenated into N tokens.

    cu_seqlens: [B + 1] int32, from 0 to N; position_ids: [1, N] int64, from 0 in each sequence; slots: [N] int64, token
    indices in a right-padded [B, max_len].
    """

    cu_seqlens: Tensor
    position_ids: Tensor
    slots: Tensor
    max_len: int
    tree: TreeLayout | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @classmethod
    def of(cls, cu_seqlens: Tensor, parents: Tensor | None = None) -> "Packing":
        """Build from borders [B + 1] int.

        Raises:
            ValueError: borders do not start at 0 or do not increase.
        """
        starts = cu_seqlens.to(torch.int64)
        lengths = starts.diff()
        if len(starts) < 2 or int(starts[0]) != 0 or int(lengths.min()) < 1:
            raise ValueError(f"invalid borders of packed sequences: {starts.tolist()}")
        num_tokens, max_len = int(starts[-1]), int(lengths.max())
        positions = torch.arange(num_tokens, device=starts.device) - starts[:-1].repeat_interleave(lengths)
        rows = torch.arange(len(lengths), device=starts.device).repeat_interleave(lengths)
        slots = rows * max_len + positions
        if parents is None:
            return cls(starts.to(torch.int32), positions[None], slots, max_len)
        tree = TreeLayout.of(starts, parents)
        return cls(starts.to(torch.int32), tree.position_ids[None], slots, max_len, tree)


@dataclass(frozen=True, slots=True)
class PackedInput:
    """Input of one forward pass.

    tokens: [N] int64; positions: [M] int64, to score, never a sequence's first; temperatures: [M] float32, NaN for the
    default, None if all are; reference: for a full KL; images: in token order; head_alone: detach values from the
    policy; with_next: also return values after `positions`; distillation: for a divergence from teachers; top: return
    the most probable tokens alone; hidden: [1, N, H], of the previous pipeline stage.
    """

    tokens: Tensor
    packing: Packing
    positions: Tensor
    temperatures: Tensor | None = None
    reference: ReferenceStates | None = None
    images: tuple[PromptImage, ...] = ()
    head_alone: bool = False
    with_next: bool = False
    distillation: Distillation | None = None
    top: TopQuery | None = None
    hidden: Tensor | None = None

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        cu_seqlens: Tensor,
        positions: Tensor,
        temperatures: Tensor | None = None,
        images: tuple[PromptImage, ...] = (),
        parents: Tensor | None = None,
    ) -> "PackedInput":
        """Build the input.

        Raises:
            ValueError: invalid borders, or a sequence's first position.
        """
        packing = Packing.of(cu_seqlens, parents)
        if len(tokens) != packing.position_ids.shape[1]:
            raise ValueError(f"{len(tokens)} tokens, but the borders cover {packing.position_ids.shape[1]}")
        if bool((packing.position_ids[0, positions] == 0).any()):
            raise ValueError("no logit predicts a sequence's first token")
        return cls(tokens, packing, positions, temperatures, images=images)

    @property
    def valued(self) -> Tensor:
        """Return the tokens whose hidden states give values, [M], or with the next ones, [2 M] int64."""
        return torch.cat([self.predictors, self.positions]) if self.with_next else self.predictors

    @property
    def predictors(self) -> Tensor:
        """Tokens that predict `positions`, [M] int64."""
        tree = self.packing.tree
        return self.positions - 1 if tree is None else tree.before[self.positions]

    def to(self, device: torch.device) -> "PackedInput":
        if self.tokens.device == device:
            return self
        packing = Packing(
            self.packing.cu_seqlens.to(device),
            self.packing.position_ids.to(device),
            self.packing.slots.to(device),
            self.packing.max_len,
            None if self.packing.tree is None else self.packing.tree.to(device),
        )
        temperatures = None if self.temperatures is None else self.temperatures.to(device)
        reference = (
            None if self.reference is None else ReferenceStates(self.reference.hidden.to(device), self.reference.head)
        )
        return replace(
            self,
            tokens=self.tokens.to(device),
            packing=packing,
            positions=self.positions.to(device),
            temperatures=temperatures,
            reference=reference,
            distillation=None if self.distillation is None else self.distillation.to(device),
        )
