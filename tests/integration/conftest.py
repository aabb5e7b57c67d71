"""A process group of one."""

from collections.abc import Iterator

import pytest
import torch

from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    with process_group(ranks_of_environment("cpu")) as ranks:
        yield ranks
