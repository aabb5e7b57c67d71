import json
from pathlib import Path

import pytest

from offbeat.envs.dataset.files import RowError, open_rows
from offbeat.services.rollout.data.rows import row_of_group


def test_each_epoch_traverses_every_row_once_in_another_order():
    first = [row_of_group(n, 10, 7, shuffle=True) for n in range(10)]
    second = [row_of_group(n, 10, 7, shuffle=True) for n in range(10, 20)]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != [row_of_group(n, 10, 8, shuffle=True) for n in range(10)]
    assert [row_of_group(n, 3, 7, shuffle=False) for n in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_lines_are_named_by_file_and_number(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": "ü"}\nnot json\n[1]\n', encoding="utf-8")
    with path.open("a") as file:
        file.write(f'{{"a": {"[" * 100_000}\n')
    rows = open_rows(path)
    assert (len(rows), rows.columns) == (5, ("a",))
    assert rows[1] == {"a": "ü"}
    assert rows.name(1) == f"{path}:3"
    with pytest.raises(RowError, match=r"rows.jsonl:4: not JSON"):
        rows[2]
    with pytest.raises(RowError, match=r"rows.jsonl:5: expected an object, got list"):
        rows[3]
    with pytest.raises(RowError, match=r"rows.jsonl:6: not JSON: maximum recursion depth"):
        rows[4]
    scanned = rows.scan(("a",))
    assert [next(scanned), next(scanned)] == [{"a": 1}, {"a": "ü"}]
    with pytest.raises(RowError, match=r"rows.jsonl:4: not JSON"):
        next(scanned)


def test_a_changed_file_is_read_anew(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n')
    assert len(open_rows(path)) == 1
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert len(open_rows(path)) == 2


def test_parquet_and_saved_datasets_hold_the_same_rows(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"prompt": "x", "response": "y"}, {"prompt": "z", "response": "w"}])
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in table))
    read = [
        [dict(rows[i]) for i in range(len(rows))]
        for rows in map(open_rows, (tmp_path / "rows.parquet", tmp_path / "saved", lines))
    ]
    assert read[0] == read[1] == read[2]
    for name in ("rows.parquet", "saved", "rows.jsonl"):
        assert [row.get("prompt") for row in open_rows(tmp_path / name).scan(("prompt", "absent"))] == ["x", "z"]


def test_mappings_of_a_table_have_no_keys_of_others(tmp_path: Path):
    """Arrow fills them with null; a row keeps all columns."""
    datasets = pytest.importorskip("datasets")
    boxes = [{"bbox_2d": [0, 0, 1, 1], "label": "cat"}, {"bbox_2d": [0, 0, 2, 2]}]
    rows = [
        {"truth": boxes, "deep": {"a": {"b": 1}}, "note": None},
        {"truth": [], "deep": {"a": {"c": 2}}, "note": "n"},
    ]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    for name in ("rows.parquet", "saved", "rows.json"):
        read = open_rows(tmp_path / name)
        assert [read[0], read[1]] == rows, name


@pytest.mark.parametrize(("text", "problem"), [(None, "no such file"), ("", "has no rows")])
def test_a_file_without_rows_is_refused(text: str | None, problem: str, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        open_rows(path)
