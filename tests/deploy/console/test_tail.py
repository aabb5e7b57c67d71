import json
from pathlib import Path

from offbeat.deploy.console.tail import JsonLinesTail


def test_a_row_that_is_completed_while_others_are_consumed_is_read_next(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"number": i} for i in range(3)]
    first, second, third = (json.dumps(row) + "\n" for row in rows)
    tail = JsonLinesTail(path)
    path.write_text(first + second[:5])
    assert tail.restarted()
    reading = tail.read()
    read = [next(reading)]
    with path.open("a") as file:
        file.write(second[5:] + third)
    read += reading
    assert not tail.restarted()
    assert [*read, *tail.read()] == rows
    assert list(tail.read()) == []
