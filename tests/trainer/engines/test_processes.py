import os

import pytest
import torch

from trainer.engines.processes import Ranks, process_group


def test_after_a_process_group_the_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with process_group(Ranks(0, 0, 1, torch.device("cpu"))):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
    assert os.environ["RANK"] == "3"
    assert "WORLD_SIZE" not in os.environ
