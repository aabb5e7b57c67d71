"""Scores in files: read only for the tokens, model and settings that they were computed from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat.services.errors import ControlError
from offbeat.trainer.config.run import LearnerRunConfig
from offbeat.trainer.config.scored_roles import ScoredRole, scored_roles
from offbeat.trainer.learner.file_scores import open_file_scores
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.score_files import ROWS_PER_FILE, ScoreFiles, token_digest
from offbeat.trainer.training.score_keys import earlier_file_key, file_key, score_keys
from tests.trainer.trajectories import group, trajectory

GROUP = group(0, trajectory(0, [(2, 2, 0.0)]))


def test_files_are_missing_until_they_are_written(tmp_path: Path):
    files, num_rows = ScoreFiles(tmp_path / "rows.jsonl", "teacher.a@1"), ROWS_PER_FILE + 2
    assert files.missing_files(num_rows) == [range(ROWS_PER_FILE), range(ROWS_PER_FILE, num_rows)]
    digest = token_digest(GROUP)
    files.write(range(ROWS_PER_FILE), {3: (digest, b"scores")})
    assert files.missing_files(num_rows) == [range(ROWS_PER_FILE, num_rows)]
    assert ScoreFiles(tmp_path / "rows.jsonl", "teacher.a@1").read(3, digest) == b"scores"
    for row, advice in ((4, "remove rows-00000000.safetensors and run"), (ROWS_PER_FILE, "run")):
        with pytest.raises(ControlError, match=f"no scores of row {row + 1}: {advice} `offbeat distill prepare"):
            files.read(row, digest)


def test_the_last_file_of_a_dataset_that_has_grown_is_scored_again(tmp_path: Path):
    files = ScoreFiles(tmp_path / "rows.jsonl", "teacher.a@1")
    files.write(range(ROWS_PER_FILE), {})
    files.write(range(ROWS_PER_FILE, ROWS_PER_FILE + 2), {ROWS_PER_FILE: (token_digest(GROUP), b"old")})
    assert not files.missing_files(ROWS_PER_FILE + 2)
    assert not files.missing_files(ROWS_PER_FILE + 1)
    (grown,) = files.missing_files(ROWS_PER_FILE + 3)
    assert grown == range(ROWS_PER_FILE, ROWS_PER_FILE + 3)
    files.write(grown, {row: (token_digest(GROUP), b"new") for row in grown})
    assert not files.missing_files(ROWS_PER_FILE + 3)
    assert files.read(ROWS_PER_FILE + 2, token_digest(GROUP)) == b"new"


def test_a_damaged_file_is_missing(tmp_path: Path):
    files = ScoreFiles(tmp_path / "rows.jsonl", "teacher.a@1")
    files.write(range(2), {0: (token_digest(GROUP), b"scores")})
    (path,) = files.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert files.missing_files(2) == [range(2)]


def test_scores_of_other_tokens_are_refused(tmp_path: Path):
    files = ScoreFiles(tmp_path / "rows.jsonl", "teacher.a@1")
    files.write(range(1), {0: (token_digest(GROUP), b"scores")})
    for other in ([(2, 3, 0.0)], [(1, 3, 0.0)]):
        with pytest.raises(ControlError, match="row 1 was scored with other tokens"):
            files.read(0, token_digest(replace(GROUP, trajectories=(trajectory(0, other),))))


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
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text("{}\n")
    run, role = run_of(folder, tmp_path, data={"dataset_name": dataset})
    with pytest.raises(ControlError, match="no scores of 1 of 1 rows"):
        open_file_scores(run, dataset)
    for of_key, scores in ((earlier_file_key(run, role), b"earlier"), (file_key(run, role), b"again")):
        ScoreFiles(dataset, of_key).write(range(1), {0: (token_digest(GROUP), scores)})
        files = open_file_scores(run, dataset)
        assert files is not None
        assert files.attach(GROUP).scores == {file_key(run, role): scores}


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
