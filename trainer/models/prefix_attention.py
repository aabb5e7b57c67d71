"""Attention with prefixes (roots, continued by branches) computed once.

Invariant: results and gradients equal those of [root | branch].
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class SharedPrefixLayout:
    """G roots and B branches in a row of N tokens, all int64.

    root_rows, branch_rows: [Nr], [Nb] tokens in the row; root_slots, branch_slots: indices in right-padded [G,
    root_len], [B, branch_len]; owner, prefix_len: [B] a branch's root and its length; before: [N] predecessors (0 for
    the row's first).
    """

    root_rows: Tensor
    root_slots: Tensor
    branch_rows: Tensor
    branch_slots: Tensor
    owner: Tensor
    prefix_len: Tensor
    before: Tensor
    num_roots: int
    root_len: int
    branch_len: int
    longest_prefix: int

    @property
    def longest(self) -> int:
        """Return an upper bound of sequence lengths."""
        return max(self.root_len, self.longest_prefix + self.branch_len)

    @classmethod
    def of(cls, cu_seqlens: Tensor, parents: Tensor) -> "SharedPrefixLayout":
        """Build from borders [K + 1] and parents [K]: a branch's root, -1 for a root.

        Raises:
            ValueError: no branch, or a parent is not a root.
        """
        starts = cu_seqlens.to(torch.int64)
        lengths = starts.diff()
        is_root = parents < 0
        branches = parents[~is_root]
        if not len(branches) or int(branches.max()) >= len(parents) or not bool(is_root[branches].all()):
            raise ValueError(f"not branches of roots: parents {parents.tolist()}")
        block = torch.arange(len(lengths), device=starts.device).repeat_interleave(lengths)
        offset_in_block = torch.arange(int(starts[-1]), device=starts.device) - starts[:-1][block]
        index = torch.where(is_root, is_root.cumsum(0), (~is_root).cumsum(0)) - 1  # among roots or branches
        root_len, branch_len = int(lengths[is_root].max()), int(lengths[~is_root].max())
        width = torch.where(is_root, root_len, branch_len)
        slots = index[block] * width[block] + offset_in_block
        in_root = is_root[block]
        before = torch.arange(len(block), device=starts.device) - 1
        first = (offset_in_block == 0) & ~in_root
        before[first] = starts[1:][parents[block[first]]] - 1
        return cls(
            root_rows=in_root.nonzero()[:, 0],
            root_slots=slots[in_root],
            branch_rows=(~in_root).nonzero()[:, 0],
            branch_slots=slots[~in_root],
            owner=index[branches],
            prefix_len=lengths[branches],
            before=before.clamp(min=0),
            num_roots=int(is_root.sum()),
            root_len=root_len,
            branch_len=branch_len,
            longest_prefix=int(lengths[branches].max()),
        )

    def to(self, device: torch.device) -> "SharedPrefixLayout":
        tensors: dict[str, Any] = {
            name: getattr(self, name).to(device)
            for name in ("root_rows", "root_slots", "branch_rows", "branch_slots", "owner", "prefix_len", "before")
        }
        return SharedPrefixLayout(
            **tensors,
            num_roots=self.num_roots,
            root_len=self.root_len,
            branch_len=self.branch_len,
            longest_prefix=self.longest_prefix,
        )

    def mask(self) -> Tensor:
        """Return the branches' mask, root first: [B or 1, 1, branch_len, longest_prefix + branch_len] bool."""
        steps = torch.arange(self.branch_len, device=self.owner.device)
        is_causal = steps[:, None] >= steps[None]
        lengths = self.prefix_len.unique()
        visible = torch.arange(self.longest_prefix, device=self.owner.device) < lengths[:1, None]
        if len(lengths) > 1:
            visible = torch.arange(self.longest_prefix, device=self.owner.device) < self.prefix_len[:, None]
        visible_prefix = visible[:, None].expand(-1, self.branch_len, -1)
        return torch.cat([visible_prefix, is_causal.expand(len(visible_prefix), -1, -1)], 2)[:, None]


def position_ids(cu_seqlens: Tensor, parents: Tensor) -> Tensor:
    """Return [1, N] int64, from 0 in roots, continued in branches."""
    starts = cu_seqlens.to(torch.int64)
    lengths = starts.diff()
    first = torch.where(parents < 0, 0, lengths[parents.clamp(min=0)])
    offset = (first - starts[:-1]).repeat_interleave(lengths)
    return (torch.arange(int(starts[-1]), device=starts.device) + offset)[None]


def shared_prefix_attention(
    query: Tensor, key: Tensor, value: Tensor, branches: SharedPrefixLayout, scale: float | None, dropout: float
) -> Tensor:
    """Compute attention: query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]."""
    gqa = query.shape[1] != key.shape[1]
    rows = [states[0].transpose(0, 1) for states in (query, key, value)]
    roots = [
        _pad(states, branches.root_rows, branches.root_slots, branches.num_roots, branches.root_len) for states in rows
    ]
    root_out = scaled_dot_product_attention(*roots, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=gqa)
    count = len(branches.owner)
    branch_parts = [
        _pad(states, branches.branch_rows, branches.branch_slots, count, branches.branch_len) for states in rows
    ]
    visible = [
        torch.cat([root[:, :, : branches.longest_prefix].index_select(0, branches.owner), branch], 2)
        for root, branch in zip(roots[1:], branch_parts[1:], strict=True)
    ]
    branch_out = scaled_dot_product_attention(
        branch_parts[0], *visible, attn_mask=branches.mask(), dropout_p=dropout, scale=scale, enable_gqa=gqa
    )
    out = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
    out = out.index_copy(0, branches.root_rows, _rows(root_out, branches.root_slots))
    return out.index_copy(0, branches.branch_rows, _rows(branch_out, branches.branch_slots))[None]


def _pad(rows: Tensor, row_ids: Tensor, slots: Tensor, count: int, length: int) -> Tensor:
    """Right-pad with zeros: [N, H, D] -> [count, H, length, D]."""
    out = rows.new_zeros(count * length, *rows.shape[1:]).index_copy(0, slots, rows.index_select(0, row_ids))
    return out.view(count, length, *rows.shape[1:]).transpose(1, 2)


def _rows(padded: Tensor, slots: Tensor) -> Tensor:
    return padded.transpose(1, 2).flatten(0, 1).index_select(0, slots)
