"""One folder for all tests that only read."""

from pathlib import Path

import pytest

from offbeat.deploy.console.archive import FolderArchive
from tests.deploy.console.folders import write_run


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "lake")


@pytest.fixture
def archive(run_folder: Path) -> FolderArchive:
    return FolderArchive(run_folder)
