"""`offbeat audit` of a run's folder, with and without its Redis."""

import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rich.console import Console
from typer.testing import CliRunner

from offbeat.deploy.cli import audit as command
from offbeat.deploy.cli.app import app
from offbeat.deploy.cli.audit import audit_run, examine
from offbeat.deploy.cli.report import remake_report
from offbeat.deploy.config.loader import dump_yaml, load_run
from offbeat.deploy.run_folder import CLAIM
from offbeat.services.buffer.group_ledger import LedgerFile, LifeEvent
from offbeat.services.buffer.scripts import BufferKeys
from offbeat.services.keys import RunKeys
from offbeat.trainer.learner.step_groups import StepGroups
from offbeat.trainer.learner.step_ledger import StepLedger
from offbeat.trainer.training.checkpoint import Checkpoint, LearnerState, read_checkpoint
from offbeat.trainer.training.checkpoint_store import CheckpointStore
from tests.copying import replace
from tests.deploy.audit.test_audit import life
from tests.fakes import make_group
from tests.memory import measure_memory
from tests.paths import QUICKSTART


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """What a finished run leaves, but for its Redis."""
    small = ["rollout_batch_size=8", "train_env_manager.group_size=8", "train_env_manager.num_env_groups=1"]
    config = load_run(QUICKSTART, [f"output_dir={tmp_path}", "max_steps=2", *small])
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    ledger, journal = LedgerFile(tmp_path), StepLedger(tmp_path, 1)
    journal.write_resumed(0)
    for n in range(2):
        taken = StepGroups(groups=[make_group(n, version=n)])
        journal.write_step(n + 1, taken, max_staleness=1.0, skipped=False)
    rows = [(n, event, str(n)) for n in range(2) for event in ("admitted", "submitted")]
    ledger.append(life(*rows, (0, "trained", "2"), (1, "trained", "2")))
    CheckpointStore(tmp_path / "checkpoints", 2, 1).save(LearnerState(2, "now"), lambda _: None).result()
    return tmp_path


def test_the_sentence_names_groups_that_failed(run_folder: Path):
    events = [
        LifeEvent("2000-0", 7, 2, "admitted", "1"),
        LifeEvent("2001-0", 8, 2, "failed", "step_error"),
    ]
    LedgerFile(run_folder).append(events)
    answer = CliRunner().invoke(app, ["audit", str(run_folder)])
    assert "nothing trained twice. 1 group(s) failed and were not trained on." in answer.output


def test_the_command_proves_a_run_from_its_folder_alone(run_folder: Path):
    answer = CliRunner().invoke(app, ["audit", str(run_folder)])
    assert answer.exit_code == 0, answer.output
    assert "PROVEN" in answer.output
    assert "its Redis is gone" in answer.output
    tree = json.loads(CliRunner().invoke(app, ["audit", str(run_folder), "--json"]).output)
    assert (tree["proven"], tree["admitted"], tree["trained"], tree["steps"]) == (True, 2, 2, 2)
    assert [group["step"] for group in tree["groups"]] == [1, 2]
    shown = CliRunner().invoke(app, ["audit", str(run_folder), "--group", "1"]).output
    assert "group 1: admitted at version 1, submitted, consumed by step 2" in shown


def test_a_long_runs_tree_is_written_without_being_rendered(run_folder: Path):
    """Rich would hold a segment of each token: 80 KiB a group."""
    journal, ledger = StepLedger(run_folder, 1), LedgerFile(run_folder)
    rows = [(n, event, str(n)) for n in range(2, 1002) for event in ("admitted", "submitted")]
    ledger.append([replace(each, id=f"{2000 + i}-0", ordinal=7 + i) for i, each in enumerate(life(*rows))])
    for n in range(2, 1002):
        taken = StepGroups(groups=[make_group(n, version=n)])
        journal.write_step(n + 1, taken, max_staleness=1.0, skipped=False)
    written = io.StringIO()
    audit_run(str(run_folder), console=Console(file=written), as_json=True)
    assert len(json.loads(written.getvalue())["groups"]) == 1002
    again = Console(file=io.StringIO())
    assert measure_memory(lambda: audit_run(str(run_folder), console=again, as_json=True))[1] < 20 * 2**20


def test_a_reward_that_is_not_finite_is_null(run_folder: Path):
    journal = StepLedger(run_folder, 2)
    journal.write_resumed(0)
    for n in range(2):
        taken = StepGroups(groups=[make_group(n, rewards=(math.nan, 1.0), version=n)])
        journal.write_step(n + 1, taken, max_staleness=1.0, skipped=False)
    output = CliRunner().invoke(app, ["audit", str(run_folder), "--json"]).output
    assert "NaN" not in output
    assert json.loads(output)["groups"][0]["rewards"] == [None, 1.0]


def test_a_run_is_audited_on_a_machine_that_could_not_train_it(run_folder: Path):
    file = run_folder / "config.yaml"
    file.write_text(
        file.read_text().replace("device: cpu", "device: cuda").replace("pretrain: tiny", "pretrain: /gone")
    )
    assert examine(run_folder)[0].proven


def test_a_redis_that_does_not_know_the_run_is_said(run_folder: Path, redis_url: str):
    answer = CliRunner().invoke(app, ["audit", str(run_folder), "--redis", redis_url])
    by_variable = CliRunner().invoke(app, ["audit", str(run_folder)], env={"OFFBEAT_REDIS": redis_url})
    assert (by_variable.exit_code, by_variable.output) == (answer.exit_code, answer.output)
    assert answer.exit_code == 0, answer.output
    assert "its Redis has no counters of run" in answer.output


def record_run(redis: Redis, folder: Path) -> None:
    """Record a later run of the fixture's name, whose first group a worker plays."""
    run_id = load_run(QUICKSTART).exp_name
    redis.hset(RunKeys(run_id).record, mapping={"output_dir": str(folder), "created_at": "2.0"})
    redis.xadd(BufferKeys(run_id).life, {"i": 1, "n": 0, "e": "admitted", "d": "0"}, id="9000-0")


@pytest.mark.parametrize("claim", ["", "{} 1.0"])
def test_a_later_run_of_the_same_name_is_not_the_folders(
    run_folder: Path, redis_url: str, tmp_path_factory: pytest.TempPathFactory, claim: str
):
    """Its folder was moved aside; it may also be recorded as the later run's, which failed before it claimed it."""
    later = run_folder if claim else tmp_path_factory.mktemp("later")
    if claim:
        (run_folder / CLAIM).write_text(claim.format(load_run(QUICKSTART).exp_name))
    with Redis.from_url(redis_url) as redis:
        record_run(redis, later)
    found, evidence = examine(run_folder, redis_url)
    assert found.proven, found.findings
    assert (len(evidence.events), evidence.counters) == (6, None)
    assert any("its Redis has another run" in note for note in found.notes)


def test_no_report_is_made_of_a_later_run_of_the_same_name(
    run_folder: Path, redis_url: str, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
):
    with Redis.from_url(redis_url) as redis:
        record_run(redis, tmp_path_factory.mktemp("later"))
    assert remake_report(str(run_folder), redis_url) == 1
    assert "this Redis has another run" in capsys.readouterr().err
    assert not (run_folder / "report.json").exists()


def test_a_run_whose_folder_was_moved_is_still_known(run_folder: Path, redis_url: str, tmp_path: Path):
    (run_folder / CLAIM).write_text(f"{load_run(QUICKSTART).exp_name} 2.0")
    with Redis.from_url(redis_url) as redis:
        record_run(redis, tmp_path / "former")
    assert len(examine(run_folder, redis_url)[1].events) == 7


def test_brackets_are_printed_as_they_are(run_folder: Path):
    folder = run_folder / "[lake]"
    folder.mkdir()
    for name in ("config.yaml", "ledger", "checkpoints"):
        (run_folder / name).rename(folder / name)
    answer = CliRunner().invoke(app, ["audit", str(folder)])
    assert answer.exit_code == 0, answer.output
    assert "/[lake]" in answer.output


def test_the_command_fails_where_a_checkpoint_was_damaged(run_folder: Path):
    (run_folder / "checkpoints/step-000002/learner.json").write_text("{}")
    answer = CliRunner().invoke(app, ["audit", str(run_folder)])
    assert answer.exit_code == 1
    assert "checkpoints/step-000002 can't be used: learner.json is damaged" in answer.output
    assert examine(run_folder)[0].findings


def test_a_step_that_is_saved_while_the_events_are_read_is_found(run_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A next step is in the journal by then, too, whose group was admitted after the events had been read."""

    def read_slowly(*args: Any) -> tuple[list[LifeEvent], None, str]:
        journal = StepLedger(run_folder, 1)
        for n in (2, 3):
            journal.write_step(n + 1, StepGroups(groups=[make_group(n, version=n)]), max_staleness=1.0, skipped=False)
        journal.close()
        CheckpointStore(run_folder / "checkpoints", 2, 2).save(LearnerState(3, "now"), lambda _: None).result()
        rows = [(2, "admitted", "2"), (2, "submitted", "2"), (2, "trained", "3")]
        newer = [replace(event, id=f"{3000 + i}-0", ordinal=7 + i) for i, event in enumerate(life(*rows))]
        return [*read(*args)[0], *newer], None, ""

    file = run_folder / "config.yaml"
    file.write_text(file.read_text().replace("max_steps: 2", "max_steps: 9"))
    read = command._read_events
    monkeypatch.setattr(command, "_read_events", read_slowly)
    found, _ = examine(run_folder)
    assert found.proven, found.findings
    assert found.lineage.last == 3


def test_a_checkpoint_that_is_removed_while_it_is_read_is_left_out(run_folder: Path, monkeypatch: pytest.MonkeyPatch):
    def remove(path: Path) -> Checkpoint:
        if path.name == "step-000001":
            shutil.rmtree(path)
        return read_checkpoint(path)

    shutil.copytree(run_folder / "checkpoints/step-000002", run_folder / "checkpoints/step-000001")
    monkeypatch.setattr(command, "read_checkpoint", remove)
    found, evidence = examine(run_folder)
    assert found.proven, found.findings
    assert evidence.checkpoints == {2: ""}


@pytest.mark.parametrize(("run", "says"), [("nowhere", "there is no run in nowhere"), (".", "has no ledger/")])
def test_where_there_is_nothing_to_audit_it_says_so(tmp_path: Path, monkeypatch, run: str, says: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(dump_yaml(load_run(QUICKSTART)))
    answer = CliRunner().invoke(app, ["audit", run])
    assert answer.exit_code == 2
    assert says in answer.output
