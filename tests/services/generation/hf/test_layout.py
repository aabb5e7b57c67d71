"""Blocks of rows attend as each row would alone."""

import random
from typing import Any

import pytest
import torch
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention

from offbeat.services.generation.hf.attention import KvCache, row_attention
from offbeat.services.generation.hf.layout import BLOCK_COST, MAX_PADDING, Chunk, StepLayout

KEYS, SHARED, DIMENSION, LENGTH = 2, 3, 8, 40


class Layer(Module):
    layer_idx = 0


def states(heads: int, count: int, seed: int) -> torch.Tensor:
    return torch.randn(1, heads, count, DIMENSION, generator=torch.Generator().manual_seed(seed))


def run(cache: KvCache, chunks: list[Chunk], seed: int, **kwargs: Any) -> dict[int, tuple[torch.Tensor, ...]]:
    """Return output, query, key and value of each row's chunk, [tokens, heads, D]."""
    layout = StepLayout(chunks, LENGTH)
    total = sum(len(chunk.tokens) for chunk in chunks)
    query, key, value = (states(heads, total, seed + i) for i, heads in enumerate((KEYS * SHARED, KEYS, KEYS)))
    out, _ = row_attention(Layer(), query, key, value, None, layout=layout, cache=cache, **kwargs)
    counts = {chunk.row: len(chunk.tokens) for chunk in chunks}
    lengths = [counts[row] for row in layout.rows]
    parts = [each[0].transpose(0, 1).split(lengths) for each in (query, key, value)]
    outs = out[0].split(lengths)
    return {row: tuple(each) for row, *each in zip(layout.rows, outs, *parts, strict=True)}


@pytest.mark.parametrize("window", [None, 4])
def test_each_row_attends_to_its_own_tokens_up_to_each_position(window: int | None) -> None:
    """Ragged prompts, then single tokens and longer chunks in one pass, with rows that take no part."""
    cache = KvCache(20, LENGTH)
    first = [Chunk(row, 0, [1] * (3 + row)) for row in (0, 1, 2, 4, 9, 10, 17)]
    before = run(cache, first, 1, sliding_window=window)
    second = [Chunk(row, 3 + row, [1] * count) for row, count in ((0, 1), (1, 1), (4, 1), (2, 5), (9, 4), (17, 1))]
    for row, (out, query, key, value) in run(cache, second, 5, sliding_window=window).items():
        keys, values = (torch.cat([before[row][i], new]).transpose(0, 1) for i, new in ((2, key), (3, value)))
        total = keys.shape[1]
        at = torch.arange(total - len(query), total)[:, None]
        allowed = torch.arange(total) <= at
        if window is not None:
            allowed &= torch.arange(total) > at - window
        k, v = (each.repeat_interleave(SHARED, 0) for each in (keys, values))
        alone = scaled_dot_product_attention(query.transpose(0, 1), k, v, attn_mask=allowed)
        assert (alone.transpose(0, 1) - out).abs().max() < 1e-5


def test_adjacent_rows_are_read_in_place_and_others_gathered() -> None:
    for rows in ([3, 4, 5], [2, 4, 5]):
        (block,) = StepLayout([Chunk(row, 30, [1]) for row in reversed(rows)], LENGTH).blocks
        selected = torch.arange(10)[block.rows]
        assert selected.tolist() == rows
        assert isinstance(block.rows, slice) == (rows == [3, 4, 5])


def test_chunks_share_a_block_where_padding_costs_less_than_another_call() -> None:
    short, long = [Chunk(row, 100, [1]) for row in range(4)], [Chunk(row, 0, [1] * 600) for row in range(4, 8)]
    layout = StepLayout([*short, *long, Chunk(8, 3 * BLOCK_COST, [1])], 1024)
    assert [block.positions.shape for block in layout.blocks] == [(4, 600), (1, 1), (4, 1)]
    assert sorted(layout.rows) == list(range(9))
    assert [block.tokens for block in layout.blocks] == [slice(0, 2400), slice(2400, 2401), slice(2401, 2405)]
    (together,) = StepLayout([Chunk(0, 5, [1] * 20), Chunk(1, 9, [1] * 3), Chunk(2, 0, [1])], 1024).blocks
    assert together.positions.tolist()[1:] == [[9, 10, 11, *[-1] * 17], [0, *[-1] * 19]]


def test_the_padding_of_a_block_is_bounded_however_many_rows_it_has() -> None:
    layout = StepLayout([Chunk(0, 7999, [1]), *(Chunk(row, 499, [1]) for row in range(1, 65))], 8192)
    assert [(block.length, len(block.positions)) for block in layout.blocks] == [(8000, 1), (500, 64)]
    draw = random.Random(0)
    for _ in range(50):
        chunks = [Chunk(row, draw.randrange(2000), [1] * draw.choice((1, 1, 1, 17, 300))) for row in range(60)]
        layout = StepLayout(chunks, 4096)
        real = {chunk.row: len(chunk.tokens) * chunk.end for chunk in chunks}
        rows = iter(layout.rows)
        for block in layout.blocks:
            pairs = sum(real[next(rows)] for _ in block.positions)
            assert block.positions.numel() * block.length - pairs <= max(BLOCK_COST, MAX_PADDING * pairs)


def test_a_copied_prefix_serves_another_row() -> None:
    cache = KvCache(3, LENGTH)
    run(cache, [Chunk(0, 0, [1] * 12)], 1)
    cache.copy(0, 2, 12)
    results = [run(cache, [Chunk(row, 12, [1])], 9)[row][0] for row in (0, 2)]
    assert torch.equal(*results)


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"s_aux": torch.zeros(4)}])
def test_attention_of_another_kind_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="take actor_infer's strategy vllm"):
        run(KvCache(1, LENGTH), [Chunk(0, 0, [1])], 1, **extra)
