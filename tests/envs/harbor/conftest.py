import pytest

from tests.envs.harbor.task_folder import TaskFolder


@pytest.fixture
def task_folder(tmp_path) -> TaskFolder:
    return TaskFolder(tmp_path / "set/example")
