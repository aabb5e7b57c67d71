"""Runs of `offbeat train` on datasets of a hub, by their ids: supervised fine-tuning, and answers to prompts."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from offbeat.envs.dataset.arithmetic import write_problems
from offbeat.envs.dataset.files import open_rows
from tests.dataset_repository import sums, write_repository
from tests.hub import DATASET, SHA, DatasetHub
from tests.integration.mesh import HF_INFER, SHORT, TrainProcess
from tests.paths import CONFIGS

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]

SFT = (
    f"data={{dataset_name: '{DATASET}:main', val_dataset_name: '{DATASET}:main', prompt_key: question, "
    "response_key: answer}",
    *("max_steps=4", "save_steps=2", "eval_steps=0", "sequence_length=128"),
)
RLVR = (
    *(f"data.dataset_name={DATASET}", f"data.val_dataset_name={DATASET}", HF_INFER),
    *("max_steps=2", "zero_variance=train", "~max_refill_ratio"),
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "repository"


@pytest.fixture
def home(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Serve a repository, and set the variables of the hub; the folder of its cache."""
    folders = {"folder": repository, "rows": repository, "export": repository, "requested": []}
    with ThreadingHTTPServer(("127.0.0.1", 0), type("FolderHub", (DatasetHub,), folders)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield tmp_path / "hf"
        server.shutdown()


def recorded_rows(folder: Path, key: str) -> list[dict[str, object]]:
    """Return the rows of the path that a run's configuration has."""
    path = Path(yaml.safe_load((folder / "config.yaml").read_text())["data"][key])
    assert SHA in path.parts
    rows = open_rows(path)
    return [dict(rows[index]) for index in range(len(rows))]


def test_a_run_reads_its_rows_from_the_hub_and_is_reproduced_without_the_cache(
    home: Path, repository: Path, tmp_path: Path
):
    write_repository(repository)
    train = TrainProcess(tmp_path / "run", *SFT, config=CONFIGS / "sft.yaml", small=("~data.num_train_epochs",))
    try:
        assert train.wait() == 0, train.output
    finally:
        train.close()
    report = train.report()
    assert (report["pipeline"], report["steps"], report["groups_failed"]) == ("sft", 4, {})
    assert recorded_rows(train.output_dir, "dataset_name") == sums(0, 32)
    assert recorded_rows(train.output_dir, "val_dataset_name") == sums(32, 8)
    shutil.rmtree(home / "hub")
    command = ["learner", "reproduce", str(train.output_dir), "--step", "4"]
    again = subprocess.run(
        [sys.executable, "-m", "offbeat.deploy.cli.app", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "weights equal to the checkpoint's, bit for bit" in again.stdout
    assert recorded_rows(train.output_dir, "dataset_name") == sums(0, 32)


@pytest.mark.usefixtures("home")
def test_a_policy_answers_the_prompts_of_a_dataset_of_the_hub(repository: Path, tmp_path: Path):
    repository.mkdir()
    for name, held_out in (("train", False), ("test", True)):
        write_problems(repository / f"{name}.jsonl", held_out=held_out)
    train = TrainProcess(tmp_path / "run", *RLVR, config=CONFIGS / "rlvr.yaml", small=SHORT)
    try:
        assert train.wait() == 0, train.output
    finally:
        train.close()
    report = train.report()
    assert (report["pipeline"], report["steps"], report["groups_failed"]) == ("rlvr", 2, {})
    rows = recorded_rows(train.output_dir, "val_dataset_name")
    greedy = next(each for each in report["evaluations"] if each["sampling"] == "greedy")
    assert greedy["metrics"]["episodes"] == len(rows) == sum(1 for _ in (repository / "test.jsonl").open())
