"""`offbeat ui`: folders without a mesh, read only."""

import os
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from offbeat.deploy.cli.app import app
from offbeat.deploy.console.server import FolderRuns, create_folder_api
from offbeat.deploy.run_folder import Endpoints, locked, write_endpoints
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


def test_an_active_run_is_shown_by_its_own_service(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "lake")
    with locked(folder):
        write_endpoints(folder, Endpoints(os.getpid(), "redis://", "http://127.0.0.1:5"))
        shown = CliRunner().invoke(app, ["ui", str(folder)])
    assert (shown.exit_code, shown.output) == (0, "The run is active: http://127.0.0.1:5/ui\n")
