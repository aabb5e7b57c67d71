"""A tiny policy's folder, and a process group of one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.engines.process_group import Ranks, process_group, ranks_of_environment
from offbeat.trainer.models.tiny import write_tiny_policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    write_tiny_policy(path, TinyPolicyConfig(num_hidden_layers=2), ["a", "b", "c", "d"])
    return path


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    with process_group(alone := ranks_of_environment("cpu")):
        yield alone
