import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from offbeat.benchmarks import suite
from offbeat.benchmarks.suite import SuiteError, SuiteOptions, page, parse_names
from offbeat.deploy.cli.app import app


def result(**changes: Any) -> dict[str, Any]:
    values = {
        "bench": "scale",
        "build": "0.2.0 0123abcd",
        "command": ["offbeat", "bench", "scale"],
        "measured_at": "2026-11-27T10:00:00+00:00",
        "machine": {"cpu": "", "cpus": 2, "load": [0.5, 1.0, 2.0]},
        "tables": [{"title": "One | two", "columns": ["a|b", "c"], "rows": [["1", ""], ["2", "x|y"]]}],
    }
    return values | changes


def bench_all(folder: Path, *arguments: str) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, ["bench", "all", "--folder", str(folder), *arguments], catch_exceptions=False)
    return outcome.exit_code, outcome.output


def test_a_page_has_each_table_with_its_command_build_and_machine() -> None:
    assert list(page([result()])) == [
        "# Benchmarks",
        "",
        "## scale",
        "",
        "`offbeat bench scale`, build 0.2.0 0123abcd, 2026-11-27: 2 cores of an unknown processor, load 0.5 at the end.",
        "",
        "One | two:",
        "",
        "| a\\|b | c |",
        "| --- | --- |",
        "| 1 |  |",
        "| 2 | x\\|y |",
    ]


def test_names_are_those_of_the_benchmarks() -> None:
    assert parse_names("trees, buffer,") == ("trees", "buffer")
    assert parse_names("") == tuple(suite.BENCHES)
    with pytest.raises(SuiteError, match="no benchmark tree, peer; there are buffer"):
        parse_names("tree,scale,peer")
    assert bench_all(Path("unused"), "--only", "tree")[0] == 2


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_benchmark_that_fails_is_named_and_the_others_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(suite.BENCHES, "scale", ("--rounds", "0"))
    status, output = bench_all(tmp_path, "--quick", "--only", "scale,redundancy")
    assert status == 1
    assert f"1/2 scale: failed, exit status 2, see {tmp_path / 'scale.log'}" in output
    assert "--rounds" in (tmp_path / "scale.log").read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["failed"].keys() == {"scale"}
    (measured,) = summary["benchmarks"].values()
    assert measured["command"] == ["offbeat", "bench", "redundancy", "--quick"]
    assert measured["build"] == suite.build()
    (table,) = measured["tables"]
    assert (tmp_path / "benchmarks.md").read_text().count("\n| ") == 2 + len(table["rows"])


def test_results_of_this_build_are_kept_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []

    def measure(_: SuiteOptions, name: str) -> str:
        measured.append(name)
        return "not here"

    monkeypatch.setattr(suite, "_measure", measure)
    monkeypatch.setattr(suite, "build", lambda: "0.2.0 0123abcd")
    (tmp_path / "scale.json").write_text(json.dumps(result()))
    (tmp_path / "trees.json").write_text(json.dumps(result(bench="trees")))
    (tmp_path / "turn.json").write_text(
        json.dumps(result(build="0.2.0 4567abcd", command=["offbeat", "bench", "turn"]))
    )
    (tmp_path / "weights.json").write_text("{")
    options = SuiteOptions(tmp_path, ("scale", "trees", "turn", "weights"))
    assert suite.run(options).keys() == {"trees", "turn", "weights"}
    assert measured == ["trees", "turn", "weights"], "trees was measured by another command"
    assert suite.run(SuiteOptions(tmp_path, ("scale",), fresh=True)).keys() == {"scale"}
    monkeypatch.setattr(suite, "build", lambda: "0.2.0 0123abcd+")
    assert suite.run(SuiteOptions(tmp_path, ("scale",))).keys() == {"scale"}, "files differ from the commit"
