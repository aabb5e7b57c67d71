import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from offbeat.deploy.cli import reproduce
from offbeat.deploy.cli.reproduce import ReproduceError, reproduce_run
from offbeat.deploy.config.loader import dump_yaml, load_run
from offbeat.deploy.run_folder import write_config
from offbeat.trainer.training.reproduction import ReproductionResult, WeightComparison
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


def test_a_difference_of_other_shapes_is_null_in_json() -> None:
    compared = (WeightComparison(1, equal=False, tensors=0, largest_difference=math.inf),)
    tree = reproduce._as_tree(ReproductionResult(0, (1,), compared))
    assert json.loads(json.dumps(tree, allow_nan=False))["compared"][0]["largest_difference"] is None
