from pathlib import Path

import pytest

from tests.trainer.learner.harness import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)
