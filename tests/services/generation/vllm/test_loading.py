"""Loaded parameters against the tensors of their file."""

import pytest
import torch

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
