"""Ranks of a learner as processes, each of which runs a test's script."""

import os
from pathlib import Path

from offbeat.services.process import free_port
from tests.forked import ForkedProcess


def run_ranks(script: str, world: int, *arguments: object, timeout_s: float = 500) -> None:
    """Run a script of this folder as each of `world` ranks, until all have ended well."""
    command = [Path(__file__).with_name(script), *arguments]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    running = [ForkedProcess(command, env={**os.environ, **address, "RANK": str(rank)}) for rank in range(world)]
    try:
        assert [process.wait(timeout=timeout_s) for process in running] == [0] * world
    finally:
        for process in running:
            process.kill()
            process.wait()
