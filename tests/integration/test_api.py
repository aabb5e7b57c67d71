"""The Python API on a real run: from a notebook, and stopped, found again and resumed from a script."""

import os
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

import offbeat
from tests.integration.mesh import HF_INFER, SMALL
from tests.paths import QUICKSTART, ROOT

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]


def outputs_of(cell: nbformat.NotebookNode) -> str:
    return str([output.get("data", output.get("text", "")) for output in cell.get("outputs", [])])


def has_stepped(run: offbeat.Run) -> bool:
    metrics = run.metrics()
    return "step" in metrics and bool(metrics["step"].notna().any())


@pytest.mark.nightly
def test_the_notebook_of_the_docs_runs(tmp_path: Path) -> None:
    """Every cell runs in a real kernel, where an event loop is running already."""
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    environment = {"resources": {"metadata": {"path": str(tmp_path)}}}
    executed = NotebookClient(notebook, timeout=420, kernel_name="python3", **environment).execute()

    cells = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert "nearest" in outputs_of(cells[3]) or "adv_estimator" in outputs_of(cells[3])
    assert any("'steps': 6" in outputs_of(cell) for cell in cells)
    assert any("image/png" in outputs_of(cell) and "finished" in outputs_of(cell) for cell in cells)


def test_a_run_is_stopped_found_again_and_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = offbeat.load_config(
        QUICKSTART, [*SMALL, HF_INFER, f"output_dir={folder}", "max_steps=400", "save_steps=5"]
    )
    run = offbeat.train(config)
    deadline = time.monotonic() + 240
    while not has_stepped(run):
        assert run.state == "running", run.console
        assert time.monotonic() < deadline, run.console
        time.sleep(0.2)
    assert "learning curve" in run._repr_html_()
    children = psutil.Process(os.getpid()).children(recursive=True)

    found = offbeat.Run.open(folder)
    assert found.state == "running"
    found.stop()
    assert (run.state, found.state) == ("stopped", "stopped")
    assert run.wait() is None
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    step = int(found.checkpoints[-1].name.removeprefix("step-"))

    resumed = offbeat.train(config.model_copy(update={"max_steps": step + 2}), resume=True)
    report = resumed.wait(timeout_s=280)
    assert report is not None
    assert (report["steps"], report["attempts"]) == (step + 2, 2)
    assert resumed.checkpoints[-1].name == f"step-{step + 2:06d}"


def test_a_run_that_fails_raises_with_the_end_of_its_console(tmp_path: Path) -> None:
    config = offbeat.load_config(QUICKSTART, [*SMALL, f"output_dir={tmp_path / 'run'}"])
    (tmp_path / "run").write_text("a file where the run's folder should be\n")
    with pytest.raises(offbeat.RunFailedError, match="output_dir"):
        offbeat.train(config).wait(timeout_s=120)
