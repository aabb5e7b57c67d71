"""Paths and tests that the documentation names exist."""

import re
from functools import cache

import pytest

from tests.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = "benchmarks|deploy|trainer|services|envs|tests|docs"
FILES = sorted(
    {
        (page.name, path)
        for page in PAGES
        for path in re.findall(
            rf"`((?:{FOLDERS})/[\w/.-]+\.(?:py|lua|yaml|md|ipynb))(?:::?\w+)?`", page.read_text("utf-8")
        )
    }
)
RELIABILITY = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
CONTRACTS = {match[1]: match[0] for match in re.finditer(r"^\| (C\d) \|.*$", RELIABILITY, re.MULTILINE)}
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", RELIABILITY)))


@cache
def source(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_every_contract_names_what_holds_it_and_its_tests() -> None:
    assert sorted(CONTRACTS) == [f"C{number}" for number in range(1, 10)]
    assert all(len(re.findall(r"::test_\w+`", row)) >= 5 for row in CONTRACTS.values())


@pytest.mark.parametrize(("page", "path"), FILES)
def test_every_file_that_is_named_exists(page: str, path: str) -> None:
    assert (ROOT / path).is_file(), f"{page} names {path}"


@pytest.mark.parametrize(("path", "name"), TESTS)
def test_every_test_that_is_named_exists(path: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(", source(path), re.MULTILINE)
