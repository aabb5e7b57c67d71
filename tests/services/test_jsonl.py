import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.services.jsonl import LinesFile, last_lines, read_lines

rows = st.lists(st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=9), max_size=3), max_size=4)


@given(writes=st.lists(st.tuples(rows, st.integers(0, 60)), max_size=5))
def test_rows_are_whole_or_gone_wherever_their_writer_died(tmp_path_factory: pytest.TempPathFactory, writes):
    path = tmp_path_factory.mktemp("lines") / "file.jsonl"
    kept: list[dict] = []
    for more, cut in writes:
        file = LinesFile(path)
        kept = list(read_lines(path))  # type: ignore[arg-type]
        file.append(more)
        file.sync()
        file.close()
        assert list(read_lines(path)) == kept + more
        if cut:
            path.write_bytes(path.read_bytes()[:-cut])
    LinesFile(path).close()
    found = list(read_lines(path))
    assert None not in found
    assert found == last_lines(path)


def test_what_a_full_disk_cut_off_is_passed_over_and_may_be_written_again(tmp_path, monkeypatch):
    import os

    path = tmp_path / "file.jsonl"
    file = LinesFile(path)
    file.append([{"a": 1}])
    whole = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: whole(descriptor, data[:5]))
    with pytest.raises(OSError, match="No space left"):
        file.append([{"b": 2}])
    monkeypatch.setattr(os, "write", whole)
    file.append([{"b": 2}])
    assert list(read_lines(path)) == [{"a": 1}, None, {"b": 2}]


@pytest.mark.parametrize("length", [10, 65_535, 65_536, 65_537, 200_000])
@pytest.mark.parametrize("before", [[], [{"a": 1}]])
def test_a_partial_line_of_any_length_is_removed(tmp_path, length: int, before: list[dict[str, int]]):
    path = tmp_path / "file.jsonl"
    file = LinesFile(path)
    file.append(before)
    file.close()
    with path.open("ab") as partial:
        partial.write(b"x" * length)
    file = LinesFile(path)
    file.append([{"b": 2}])
    assert list(read_lines(path)) == [*before, {"b": 2}]


def test_no_file_has_no_rows(tmp_path):
    assert list(read_lines(tmp_path / "none")) == last_lines(tmp_path / "none") == []
