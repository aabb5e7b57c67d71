"""Scores in files: read only for the tokens, model and settings that they were computed from."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from offbeat.services.chat.template_override import write_policy_folder
from offbeat.services.errors import ControlError
from offbeat.services.rollout.data.source import DataSource
from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.config.scored_roles import ScoredRole, scored_roles
from offbeat.trainer.learner.file_scores import open_file_scores
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.prepare_scores import open_source
from offbeat.trainer.training.score_files import ROWS_PER_FILE, ScoreFiles, token_digest
from offbeat.trainer.training.score_keys import earlier_file_keys, file_key, score_keys
from tests.trainer.trajectories import group, trajectory

GROUP = group(0, trajectory(0, [(2, 2, 0.0)]))
ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@dataclass
class Rows:
    """A dataset in which no row changes."""

    num_rows: int
    stamp: str = "now"
    num_read: int = 0

    def digest(self, row: int) -> bytes:
        self.num_read += 1
        return b"%08d" % row

    def write(self, files: ScoreFiles, rows: range, scores: dict[int, tuple[bytes, bytes]]) -> None:
        files.write(rows, scores, [self.digest(row) for row in rows], self.stamp)


def test_files_are_missing_until_they_are_written(tmp_path: Path):
    files, rows = ScoreFiles(tmp_path / "rows.jsonl", "teacher.a@1"), Rows(ROWS_PER_FILE + 2)
    assert files.missing_files(rows) == [range(ROWS_PER_FILE), range(ROWS_PER_FILE, rows.num_rows)]
    digest = token_digest(GROUP)
    rows.write(files, range(ROWS_PER_FILE), {3: (digest, b"scores")})
    assert files.missing_files(rows) == [range(ROWS_PER_FILE, rows.num_rows)]
    assert ScoreFiles(tmp_path / "rows.jsonl", "teacher.a@1").read(3, digest) == b"scores"
    for row, advice in ((4, "remove rows-00000000.safetensors and run"), (ROWS_PER_FILE, "run")):
        with pytest.raises(ControlError, match=f"no scores of row {row + 1}: {advice} `offbeat distill prepare"):
            files.read(row, digest)


def test_the_last_file_of_a_dataset_that_has_grown_is_scored_again(tmp_path: Path):
    files = ScoreFiles(tmp_path / "rows.jsonl", "teacher.a@1")
    rows = Rows(ROWS_PER_FILE + 2)
    rows.write(files, range(ROWS_PER_FILE), {})
    rows.write(files, range(ROWS_PER_FILE, ROWS_PER_FILE + 2), {ROWS_PER_FILE: (token_digest(GROUP), b"old")})
    assert not files.missing_files(rows)
    assert not files.missing_files(Rows(ROWS_PER_FILE + 1, "shorter"))
    longer = Rows(ROWS_PER_FILE + 3, "longer")
    (grown,) = files.missing_files(longer)
    assert grown == range(ROWS_PER_FILE, ROWS_PER_FILE + 3)
    longer.write(files, grown, {row: (token_digest(GROUP), b"new") for row in grown})
    assert not files.missing_files(longer)
    assert files.read(ROWS_PER_FILE + 2, token_digest(GROUP)) == b"new"


def test_the_rows_of_a_copy_are_compared_once(tmp_path: Path):
    files = ScoreFiles(tmp_path / "rows.jsonl", "teacher.a@1")
    Rows(2).write(files, range(2), {})
    copy = Rows(2, "copied")
    assert not files.missing_files(copy)
    assert not ScoreFiles(tmp_path / "rows.jsonl", "teacher.a@1").missing_files(copy)
    assert copy.num_read == 2
    files.write(range(2), {}, [b"%08d" % 7] * 2, "edited")
    assert files.missing_files(copy) == [range(2)]


def test_a_damaged_file_is_missing(tmp_path: Path):
    files = ScoreFiles(tmp_path / "rows.jsonl", "teacher.a@1")
    Rows(2).write(files, range(2), {0: (token_digest(GROUP), b"scores")})
    (path,) = files.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert files.missing_files(Rows(2)) == [range(2)]


def test_a_file_of_an_earlier_build_is_counted(tmp_path: Path):
    """It has no digests of rows."""
    files = ScoreFiles(tmp_path / "rows.jsonl", "teacher.a@1")
    files.folder.mkdir(parents=True)
    save_file({"0": np.zeros(20, np.uint8)}, files.folder / "rows-00000000.safetensors", metadata={"num_rows": "2"})
    assert not files.missing_files(Rows(2))
    assert files.missing_files(Rows(3)) == [range(3)]


def test_scores_of_other_tokens_are_refused(tmp_path: Path):
    files = ScoreFiles(tmp_path / "rows.jsonl", "teacher.a@1")
    Rows(1).write(files, range(1), {0: (token_digest(GROUP), b"scores")})
    for other in ([(2, 3, 0.0)], [(1, 3, 0.0)]):
        with pytest.raises(ControlError, match="row 1 was scored with other tokens"):
            files.read(0, token_digest(replace(GROUP, trajectories=(trajectory(0, other),))))


def test_the_reference_is_no_command_s(tmp_path: Path):
    """The learner computes its scores, where they are missing."""
    files = ScoreFiles(tmp_path / "rows.jsonl", "reference@1")
    with pytest.raises(ControlError, match="no scores of row 1: start the run again"):
        files.read(0, b"")
    Rows(1).write(files, range(1), {0: (token_digest(GROUP), b"scores")})
    with pytest.raises(ControlError, match="remove the folder and start the run again"):
        files.read(0, b"other")


def write_rows(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source_of(run: LearnerRun, dataset: Path) -> DataSource:
    assert run.config.data is not None
    return open_source(run, run.config.data, dataset, run.model_folder)


def run_of(folder: Path, tmp_path: Path, tags: tuple[str, ...] = (), **changes: Any) -> tuple[LearnerRun, ScoredRole]:
    model = {"model_args": {"model_name_or_path": str(folder)}, "strategy_args": {"placement": "files"}}
    teacher = {**model, "tag_included": tags}
    tree = {"pipeline": "distill", "teacher": {"a": teacher}, "pretrain": str(folder), **changes}
    run = LearnerRun("run", "", tmp_path, LearnerRunConfig.model_validate(tree))
    (role,) = scored_roles(run.config, run.config.reference, "files")
    assert not scored_roles(run.config, run.config.reference)
    return run, role


def key(folder: Path, tmp_path: Path, **changes: Any) -> str:
    run, role = run_of(folder, tmp_path, **changes)
    return score_keys(run)[role.name]


def test_scores_of_an_earlier_build_are_read_until_they_are_prepared_again(folder: Path, tmp_path: Path):
    """A run of that build resumes without its teacher."""
    dataset = write_rows(tmp_path, ROW)
    run, role = run_of(folder, tmp_path, data={"dataset_name": dataset})
    with pytest.raises(ControlError, match="no scores of 1 of 1 rows"):
        open_file_scores(run, dataset)
    newer, oldest = earlier_file_keys(run, role)
    key = file_key(run, role, folder)
    for of_key in (oldest, newer, key):
        files, source = ScoreFiles(dataset, of_key), source_of(run, dataset)
        files.write(range(1), {0: (token_digest(GROUP), of_key.encode())}, [source.digest(0)], source.stamp)
        opened = open_file_scores(run, dataset)
        assert opened is not None
        assert opened.attach(GROUP).scores == {key: of_key.encode()}


def test_an_unreadable_row_is_the_same_in_a_copy(folder: Path, tmp_path: Path):
    digests: list[bytes] = []
    for name in ("here", "there"):
        dataset = tmp_path / name / "rows.jsonl"
        dataset.parent.mkdir()
        dataset.write_text(json.dumps(ROW) + "\n{\n")
        run, _ = run_of(folder, tmp_path, data={"dataset_name": dataset})
        digests.append(source_of(run, dataset).digest(1))
    assert digests[0] == digests[1]


def test_a_run_is_refused_before_its_first_step_once_a_row_has_changed(folder: Path, tmp_path: Path):
    dataset = write_rows(tmp_path, ROW, ROW)
    run, role = run_of(folder, tmp_path, data={"dataset_name": dataset})
    source = source_of(run, dataset)
    digests = [source.digest(row) for row in range(2)]
    ScoreFiles(dataset, file_key(run, role, folder)).write(range(2), {}, digests, source.stamp)
    assert open_file_scores(run, dataset) is not None
    write_rows(tmp_path, ROW, ROW | {"note": "of no matter"})
    assert open_file_scores(run, dataset) is not None
    write_rows(tmp_path, ROW, ROW | {"tag": "other"})
    with pytest.raises(ControlError, match="no scores of 2 of 2 rows, as they are now"):
        open_file_scores(run, dataset)


def test_a_key_changes_with_what_messages_and_tokens_are_read_by(folder: Path, tmp_path: Path):
    data: dict[str, Any] = {"dataset_name": Path("rows.jsonl")}
    settings = [
        {},
        {"train_on": "last"},
        {"prompt_key": "question"},
        {"query_key": "input"},
        {"tools_key": "functions"},
    ]
    keys = {key(folder, tmp_path, data=data | each) for each in settings}
    run, role = run_of(folder, tmp_path, data=data)
    other = tmp_path / "other"
    write_policy_folder(folder, other, "chatml")
    assert len({*keys, file_key(run, role, other)}) == len(settings) + 1


def test_a_key_changes_with_the_rows_that_have_scores(folder: Path, tmp_path: Path):
    """A longer row has none under a smaller `sequence_length`, nor one of another tag."""
    data = {"dataset_name": Path("rows.jsonl")}
    rows: list[dict[str, Any]] = [{"data": data}, {"data": {**data, "too_long": "truncate"}}]
    rows += [{"data": data, "sequence_length": 64}, {"data": data, "tags": ("math",)}]
    assert len({key(folder, tmp_path, **each) for each in rows}) == len(rows)


def test_a_key_changes_with_the_model_and_the_settings_of_the_teacher(folder: Path, tmp_path: Path):
    settings: list[dict[str, Any]] = [{}, {"logits_topk": 3}, {"teacher_temperature": 2.0}, {"distill_on_prompt": True}]
    keys = [key(folder, tmp_path, distill=each) for each in settings]
    assert len(set(keys)) == len(settings)
    assert key(folder, tmp_path, distill={"kd_temperature": 2.0, "kd_objective": "reverse_kl"}) == keys[0], (
        "of the policy alone"
    )
    other = tmp_path / "other"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes() + b" ")
    assert key(other, tmp_path) != keys[0]
