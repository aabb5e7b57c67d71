"""`offbeat ui`: folders without a mesh, read only."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from offbeat.deploy.cli.app import app
from offbeat.deploy.console.server import FolderRuns, create_folder_api
from offbeat.deploy.report.report import REPORT
from offbeat.deploy.run_folder import CONFIG, Endpoints, locked, write_endpoints
from tests.deploy.console.folders import write_run


@pytest.fixture
def http(run_folder: Path) -> TestClient:
    return TestClient(create_folder_api(FolderRuns(run_folder.parent)), base_url="http://127.0.0.1")


def test_a_folder_is_shown_as_a_run(http: TestClient) -> None:
    (run,) = http.get("/runs").json()["runs"]
    assert run == http.get("/runs/lake").json()
    assert (run["id"], run["state"], run["step"], run["max_steps"]) == ("lake", "stopped", 3, 5)
    assert run["counters"] == {
        "admitted": 10,
        "submitted": 6,
        "trained": 4,
        "dropped": {"stale": 2},
        "failed": {"step_timeout": 1},
        "in_flight": 3,
    }
    assert run["metrics"]["reward"] == 1.5
    assert http.get("/runs/lake/groups").json()["total"] == 10
    assert http.get("/session").json() == {"access": "read", "needs_token": False}
    assert http.get("/ui/").status_code == 200


@pytest.mark.parametrize("report_age_s", [None, 600.0])
def test_a_killed_run_ended_with_its_last_event(tmp_path: Path, report_age_s: float | None) -> None:
    """The configuration, and the report of an earlier start, are older than its groups."""
    folder = write_run(tmp_path / "lake")
    began_at = time.time() - 3600
    os.utime(folder / CONFIG, (began_at, began_at))
    if report_age_s is not None:
        report = {"ended_at": time.time() - report_age_s, "wall_s": 100.0}
        (folder / REPORT).write_text(json.dumps(report))
        began_at = report["ended_at"] - report["wall_s"]
    http = TestClient(create_folder_api(FolderRuns(tmp_path)), base_url="http://127.0.0.1")
    groups = http.get("/runs/lake/groups").json()["groups"]
    names = ("admitted_at", "submitted_at", "trained_at", "ended_at")
    run = http.get("/runs/lake").json()
    assert run["ended_at"] == max(group[name] for group in groups for name in names if group[name])
    assert run["started_at"] == pytest.approx(began_at)


def test_a_run_without_groups_ended_with_its_configuration(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "lake")
    shutil.rmtree(folder / "ledger")
    http = TestClient(create_folder_api(FolderRuns(tmp_path)), base_url="http://127.0.0.1")
    assert http.get("/runs/lake").json()["ended_at"] == pytest.approx((folder / CONFIG).stat().st_mtime)


def test_only_reading_is_possible(http: TestClient) -> None:
    assert http.post("/runs/lake/pause").status_code == 404
    assert http.post("/runs", json={}).status_code == 405
    unknown = http.get("/runs/sea").json()["error"]
    assert unknown["code"] == "unknown_run"
    assert unknown["message"].endswith(": lake")
    assert http.get("/runs", headers={"host": "evil.example"}).status_code == 403


def test_a_folder_that_holds_no_run_is_said_in_words(tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["ui", str(tmp_path)])
    assert refused.exit_code == 2
    assert f"there is no run in {tmp_path}: name a run's folder" in refused.output


def test_a_run_that_cannot_be_read_is_named_with_its_reason(http: TestClient, run_folder: Path) -> None:
    broken = run_folder.parent / "pond"
    broken.mkdir()
    (broken / "config.yaml").write_text("exp_name: [")
    (unreadable,) = http.get("/runs").json()["unreadable"]
    assert unreadable["id"] == "pond"
    assert unreadable["reason"].startswith(f"{broken / 'config.yaml'} can't be read: ")
    refusal = http.get("/runs/pond")
    assert (refusal.status_code, refusal.json()["error"]["message"]) == (404, unreadable["reason"])
    refused = CliRunner().invoke(app, ["ui", str(broken)])
    assert refused.exit_code == 2
    assert refused.output == f"offbeat: run pond is left out: {unreadable['reason']}\n"


def test_an_active_run_beside_others_runs_and_names_its_own_service(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "lake")
    http = TestClient(create_folder_api(FolderRuns(tmp_path)), base_url="http://127.0.0.1")
    with locked(folder):
        write_endpoints(folder, Endpoints(os.getpid(), "redis://", "http://127.0.0.1:5"))
        run = http.get("/runs/lake").json()
    assert (run["state"], run["wanted"], run["ended_at"], run["resumable"]) == ("running", "running", 0.0, False)
    assert run["phase"] == "active: see http://127.0.0.1:5/ui"
    assert http.get("/runs/lake").json()["state"] == "stopped"


def test_an_active_run_is_shown_by_its_own_service(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "lake")
    with locked(folder):
        write_endpoints(folder, Endpoints(os.getpid(), "redis://", "http://127.0.0.1:5"))
        shown = CliRunner().invoke(app, ["ui", str(folder)])
    assert (shown.exit_code, shown.output) == (0, "The run is active: http://127.0.0.1:5/ui\n")
