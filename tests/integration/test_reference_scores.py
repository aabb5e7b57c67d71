"""A learner scores rows by its reference before the first step, until it is stopped."""

import json
import os
from pathlib import Path

import pytest

from offbeat.services.process import free_port
from offbeat.trainer.training.score_files import ROWS_PER_FILE
from tests.forked import ForkedProcess
from tests.integration.reference_rank import NUM_ROWS, PAIR, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_stop_ends_the_scoring_of_rows_on_all_ranks(tmp_path: Path) -> None:
    """What was written is not scored again, neither at a start nor at a resume."""
    write_rows(tmp_path, PAIR)
    script = Path(__file__).with_name("reference_rank.py")
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    running = [
        ForkedProcess([script, tmp_path], env={**os.environ, **address, "RANK": str(rank), "OMP_NUM_THREADS": "1"})
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=240) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
    results = json.loads((tmp_path / "shown.json").read_text())
    assert results == 2 * [[False, True], [[ROWS_PER_FILE, NUM_ROWS], [NUM_ROWS, NUM_ROWS]]]
    assert len(list(tmp_path.rglob("*.scores/*/rows-*.safetensors"))) == 2
