"""Rows of a folder of files, in the order of the files' names."""

from pathlib import Path

import pytest
from datasets import Dataset

from offbeat.envs.dataset.files import open_rows
from offbeat.envs.dataset.rows import load_rows


def write(folder: Path, kind: str, number: int, texts: list[str]) -> None:
    path = folder / f"{number:05d}.{kind}"
    if kind == "parquet":
        Dataset.from_dict({"question": texts, "answer": texts}).to_parquet(path)
    elif kind == "csv":
        path.write_text("question,answer\n" + "".join(f"{text},{text}\n" for text in texts))
    else:
        path.write_text("".join(f'{{"question": "{text}", "answer": "{text}"}}\n' for text in texts))


def questions(folder: Path) -> list[str]:
    rows = open_rows(folder)
    return [str(rows[index]["question"]) for index in range(len(rows))]


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl", "json"])
def test_files_follow_each_other_by_name_and_are_read_anew_if_changed(tmp_path: Path, kind: str):
    write(tmp_path, kind, 1, ["c", "2020-01-02"])
    write(tmp_path, kind, 0, ["a", "b"])
    (tmp_path / "README.md").write_text("# Rows")
    assert questions(tmp_path) == ["a", "b", "c", "2020-01-02"]
    rows = load_rows(tmp_path, "question", "answer", "any")
    assert [rows[index]["answer"] for index in range(len(rows))] == ["a", "b", "c", "2020-01-02"]
    write(tmp_path, kind, 1, ["other"])
    assert questions(tmp_path) == ["a", "b", "other"]
    assert len(load_rows(tmp_path, "question", "answer", "any")) == 3


def test_rows_of_several_jsonl_files_need_no_columns_in_common(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "p", "id": 1}\n\n')
    (tmp_path / "b.jsonl").write_text('{"messages": []}\n{"id": "x"}\n')
    rows = open_rows(tmp_path)
    assert [rows[index] for index in range(len(rows))] == list(rows.scan(("id",)))
    assert rows[2] == {"id": "x"}
    assert (rows.name(0), rows.name(2)) == (f"{tmp_path / 'a.jsonl'}:1", f"{tmp_path / 'b.jsonl'}:2")
    assert rows.folder == tmp_path


def test_dates_of_several_json_files_are_texts(tmp_path: Path):
    for number in range(2):
        write(tmp_path, "jsonl", number, [f"2020-01-0{number + 1}"])
    assert questions(tmp_path) == ["2020-01-01", "2020-01-02"]


def test_a_folder_needs_files_of_one_kind(tmp_path: Path):
    with pytest.raises(ValueError, match=r"has no .jsonl, .json, .csv, .parquet, .txt files"):
        open_rows(tmp_path)
    write(tmp_path, "csv", 0, ["a"])
    write(tmp_path, "jsonl", 1, ["b"])
    with pytest.raises(ValueError, match=r"has files of .csv, .jsonl: it needs files of one kind"):
        open_rows(tmp_path)


def test_errors_name_no_setting_but_that_of_an_env(tmp_path: Path):
    """A run has two settings with rows, which its checks name."""
    (tmp_path / "rows.md").write_text("# Rows")
    for path, says in ((tmp_path, f"{tmp_path} is not a folder"), (tmp_path / "rows.md", "rows.md is none of")):
        with pytest.raises(ValueError, match=f"^{says}"):
            open_rows(path)
        with pytest.raises(ValueError, match=f"^dataset_name: {says}"):
            load_rows(path, "question", "answer", "any")


def test_a_link_to_nothing_is_no_file(tmp_path: Path):
    write(tmp_path, "csv", 0, ["a"])
    (tmp_path / "00001.csv").symlink_to(tmp_path / "removed")
    for read in (open_rows, lambda path: load_rows(path, "question", "answer", "any")):
        with pytest.raises(ValueError, match="no such file"):
            read(tmp_path)
