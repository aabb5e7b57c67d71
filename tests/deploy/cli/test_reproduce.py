import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from offbeat.deploy.cli.reproduce import ReproduceError, reproduce_run
from offbeat.deploy.config.loader import dump_yaml, load_run
from offbeat.deploy.run_folder import write_config
from tests.paths import QUICKSTART


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """The command prepares its process, of which it is the last act; models could no longer be downloaded here."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_reproducing_has_the_environment_of_the_runs_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DS_ACCELERATOR", "OMP_NUM_THREADS", "OF_THE_RUN"):
        monkeypatch.setenv(name, "")
    settings = [f"output_dir={tmp_path}", "actor_train.device=cpu", "system_envs.OF_THE_RUN='1'"]
    write_config(tmp_path, dump_yaml(load_run(QUICKSTART, settings)))
    with pytest.raises(ReproduceError):  # it has no batches
        reproduce_run(str(tmp_path), None, console=Console(quiet=True), as_json=False)
    assert (os.environ["DS_ACCELERATOR"], os.environ["OF_THE_RUN"]) == ("cpu", "1")
