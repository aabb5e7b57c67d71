"""`offbeat distill prepare` as a person reads it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.deploy.cli.app import app
from offbeat.envs.frozen_lake.rows import conversations, write_rows
from tests.integration.data_run import write_teacher
from tests.paths import CONFIGS


@pytest.mark.timeout(120)
def test_rows_are_scored_once_and_weights_are_loaded_without_a_bar(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, conversations(8))
    teacher = write_teacher(tmp_path / "teacher", rows)
    settings = [
        f"teacher.lake.model_args.model_name_or_path={teacher}",
        "teacher.lake.strategy_args.placement=files",
        *(f"data.dataset_name={rows}", "data.val_dataset_name=null", "eval_steps=0", f"output_dir={tmp_path / 'run'}"),
    ]
    for scored in (8, 0):
        result = CliRunner().invoke(app, ["distill", "prepare", str(CONFIGS / "distill.yaml"), *settings])
        assert result.exit_code == 0, result.output
        assert f"teacher.lake: {scored} of 8 rows scored now" in result.output
        assert "Loading" not in result.output
