"""How a batch's passes are dealt out to ranks."""

import pytest
import torch

from offbeat.trainer.engines.process_group import Ranks
from offbeat.trainer.engines.rank_passes import OnRanks


@pytest.mark.parametrize("world_size", [1, 2])
def test_empty_batch_has_no_outputs_on_any_number_of_ranks(world_size: int) -> None:
    ranks = Ranks(0, 0, world_size, torch.device("cpu"))
    assert OnRanks(ranks).outputs(lambda x: x.tokens, []) == []
