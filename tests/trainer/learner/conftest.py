from pathlib import Path

import pytest

from tests.trainer.learner.harness import LearnerHarness


@pytest.fixture
def harness(tmp_path: Path) -> LearnerHarness:
    return LearnerHarness(tmp_path)
