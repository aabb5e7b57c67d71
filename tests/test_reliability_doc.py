"""What docs/reliability.md points at exists: each contract names files and tests of this project."""

import re
from functools import cache

import pytest

from tests.paths import ROOT

TEXT = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
ROWS = {found[1]: found[0] for found in re.finditer(r"^\| (C\d) \|.*$", TEXT, re.MULTILINE)}
FILES = sorted(set(re.findall(r"`((?:deploy|trainer|services|envs|tests)/[\w/]+\.(?:py|lua))(?:::\w+)?`", TEXT)))
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))


@cache
def source(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_every_contract_names_what_holds_it_and_its_tests() -> None:
    assert sorted(ROWS) == [f"C{number}" for number in range(1, 10)]
    assert all(len(re.findall(r"::test_\w+`", row)) >= 5 for row in ROWS.values())


@pytest.mark.parametrize("path", FILES)
def test_every_file_that_is_named_is_there(path: str) -> None:
    assert (ROOT / path).is_file()


@pytest.mark.parametrize(("path", "name"), TESTS)
def test_every_test_that_is_named_is_there(path: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(", source(path), re.MULTILINE)
