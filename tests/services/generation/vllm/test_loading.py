"""Loaded parameters against the tensors of their file."""

import pytest
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from offbeat.services.generation.vllm.loading import _agrees, _probe_agrees, _repack_tied_head

pytestmark = pytest.mark.slow


def test_a_packed_matrix_that_differs_is_noticed() -> None:
    class Packed:
        def __init__(self, weight: torch.Tensor) -> None:
            self.weight, self.quant_method = weight, self

        def apply(self, _: object, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.T

    wanted = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    nudged = wanted.clone()
    nudged[17] += 3e-3
    for parts in ([wanted], list(wanted.split([16, 48]))):
        assert _probe_agrees(Packed(wanted.clone()), parts)
        assert not _probe_agrees(Packed(nudged), parts)
    rounded = wanted.bfloat16()
    assert _probe_agrees(Packed(rounded.clone()), [rounded])
    assert not _probe_agrees(Packed(rounded.roll(1, 0)), [rounded])


def test_one_workers_part_of_a_layer_is_not_compared() -> None:
    """Of two tensor ranks, one has other rows or columns than the file, or rows beyond a small vocabulary's."""

    class Layer:
        def __init__(self, tp_size: int) -> None:
            self.tp_size = tp_size

    file = torch.ones(12, 8)
    assert _agrees(Layer(2), torch.zeros(32, 8), [file])
    assert not _agrees(Layer(1), torch.zeros(32, 8), [file])


def test_rows_are_compared_with_the_files_tensors_one_after_the_other() -> None:
    parts = [torch.arange(8.0).view(2, 4), torch.arange(12.0).view(3, 4)]
    joined = torch.cat([*parts, torch.ones(3, 4)])  # rows beyond a small vocabulary's
    assert _agrees(object(), joined, parts)
    assert not _agrees(object(), joined, parts[::-1])
    joined[4, 3] += 1
    assert not _agrees(object(), joined, parts)


def test_a_stage_in_the_middle_of_a_pipeline_has_no_tied_head() -> None:
    assert _repack_tied_head(torch.nn.Linear(2, 2)) == set()


class Table(VocabParallelEmbedding):
    """A table without the ranks that vLLM's own asks for."""

    def __init__(self, rows: int, width: int) -> None:
        torch.nn.Module.__init__(self)
        self.org_vocab_size, self.embedding_dim = rows, width
        self.weight = torch.nn.Parameter(torch.rand(rows, width))


class Packing(UnquantizedEmbeddingMethod):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.register_buffer("packed", layer.weight.detach())


class Head(Table, ParallelLMHead):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.quant_method = Packing()


@pytest.mark.parametrize("first", ["embed_tokens", "embed_tokens_per_layer"])
def test_a_tied_head_has_the_table_of_its_size(first: str) -> None:
    """Gemma 4 E2B has a second table, of its layers' inputs."""
    tables = {"embed_tokens": Table(8, 4), "embed_tokens_per_layer": Table(8, 6)}
    head = Head(8, 4)
    model = torch.nn.ModuleDict({first: tables[first], **tables, "lm_head": head})
    assert _repack_tied_head(model) == {"lm_head.weight"}
    assert head.weight is tables["embed_tokens"].weight
    assert torch.equal(head.packed, head.weight)
