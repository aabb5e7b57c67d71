from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from offbeat.trainer.models.packing import PackedInput, SequenceShard


def test_an_input_moves_whole_to_another_device() -> None:
    x = PackedInput.of(torch.arange(6), torch.tensor([0, 2, 6]), torch.tensor([1, 4]), torch.ones(2))
    packing = replace(x.packing, shard=SequenceShard(None, 1, 6, (3, 3)))
    x = replace(x, packing=packing, hidden=torch.zeros(1, 6, 4), value_rows=torch.tensor([0]), head_alone=True)
    moved = x.to(torch.device("meta"))
    assert_moved(x, moved)
    assert_moved(x.packing, moved.packing)


def assert_moved(before: Any, after: Any) -> None:
    for name in (field.name for field in fields(before) if field.name != "packing"):
        value = getattr(after, name)
        assert value.device.type == "meta" if isinstance(value, Tensor) else value == getattr(before, name), name
