"""Validation rows that can't be used are left out and counted, as are those of training."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from offbeat.services.errors import ControlError
from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.learner.validation import ValidationRows, read_validation
from offbeat.trainer.run import LearnerRun

ROW: dict[str, Any] = {"prompt": "a b", "response": "c"}


def read(folder: Path, tmp_path: Path, *rows: dict[str, Any]) -> ValidationRows:
    train, val = tmp_path / "rows.jsonl", tmp_path / "val.jsonl"
    train.write_text(json.dumps(ROW) + "\n")
    val.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_name": train, "val_dataset_name": val}
    config = LearnerRunConfig.model_validate(
        {"pipeline": "sft", "pretrain": str(folder), "data": data, "sequence_length": 32}
    )
    return read_validation(LearnerRun("run", "", tmp_path, config))


def test_bad_and_long_rows_are_left_out_and_counted(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Configurations are checked by the first rows of a file alone."""
    long = {**ROW, "response": "c " * 64}
    with caplog.at_level(logging.WARNING):
        rows = read(folder, tmp_path, *[ROW] * 66, {"prompt": "a"}, long, {"prompt": 3, "response": "c"}, ROW)
    assert [group.trajectories[0].seed for group in rows.groups()] == [*range(66), 69]
    assert {name: count.value for name, count in rows.left_out.items()} == {"rows_bad": 2.0, "rows_too_long": 1.0}
    assert f"{tmp_path / 'val.jsonl'}:67: response: expected" in caplog.text
    assert f"{tmp_path / 'val.jsonl'}:69: prompt: expected" in caplog.text
    assert "3 of 70 validation rows left out" in caplog.text


def test_rows_that_are_all_used_are_not_counted(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    rows = read(folder, tmp_path, ROW, ROW)
    records = [record for record in caplog.records if record.name.startswith("offbeat")]
    assert (len(rows), rows.left_out, records) == (2, {}, [])


def test_a_file_without_a_usable_row_is_refused(folder: Path, tmp_path: Path):
    """Its evaluations would have nothing to record."""
    with pytest.raises(ControlError, match=r"no row can be evaluated \(1 rows_bad, 1 rows_too_long\)"):
        read(folder, tmp_path, {"prompt": 3, "response": "c"}, {**ROW, "response": "c " * 64})


def test_a_file_without_the_columns_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(ControlError, match=r"data.val_dataset_name: .*neither the column 'messages'"):
        read(folder, tmp_path, {"text": "a"})
