import os
import subprocess
import sys

import pytest
import torch

from offbeat.services.process import free_port
from offbeat.trainer.engines.process_group import Ranks, broadcast, process_group

pytestmark = pytest.mark.slow

OF_TWO = """
import sys, time
import torch, torch.distributed as dist
from offbeat.trainer.engines.process_group import broadcast, process_group, ranks_of_environment
print("imported", flush=True)
sys.stdin.readline()
with process_group(ranks_of_environment("cpu"), timeout_min=0.15) as ranks:
    if ranks.rank == 0:
        time.sleep(12)
    assert broadcast(ranks, b"go") == b"go"
    print("waiting", flush=True)
    if ranks.rank == 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(1))
"""


def test_after_a_process_group_the_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with process_group(Ranks(0, 0, 1, torch.device("cpu"))):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
    assert os.environ["RANK"] == "3"
    assert "WORLD_SIZE" not in os.environ


def test_broadcast_without_process_group_is_rejected() -> None:
    with pytest.raises(RuntimeError, match="no process group"):
        broadcast(Ranks(0, 0, 2, torch.device("cpu")), b"go")


def test_commands_have_a_long_timeout_and_collectives_a_short_one() -> None:
    """The leader says nothing for 12 s under a limit of 9 s; the other then never comes to their common call."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", OF_TWO],
            env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for process in pair:  # their limit of 9 s counts from here on
            assert process.stdout is not None
            assert process.stdout.readline() == "imported\n"
        for process in pair:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        said, complained = pair[0].communicate(timeout=120)
        assert pair[0].returncode == 1
        assert said == "waiting\n"
        assert "imed out" in complained, complained
        assert pair[1].poll() is None
    finally:
        for process in pair:
            process.kill()
            process.communicate()
