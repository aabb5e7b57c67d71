"""A process group of one, and engines of vLLM that start at once."""

from collections.abc import Iterator

import pytest
import torch

from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from tests import forked_engines


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    with process_group(ranks_of_environment("cpu")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def engine_forks() -> Iterator[None]:
    with forked_engines.forked_engines():
        yield
