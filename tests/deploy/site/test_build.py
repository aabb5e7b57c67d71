"""The site is built from the repository as it is, and refuses what leads nowhere."""

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("zensical", reason="the extra `docs` has it")

from offbeat.deploy.site.blocks import BLOCK, render_blocks, render_diagram
from offbeat.deploy.site.build import build_site, read_warnings
from offbeat.deploy.site.navigation import listed_pages, write_settings
from offbeat.deploy.site.reference import generate_pages
from offbeat.deploy.site.staging import PROJECT, SiteError, stage_pages
from tests.paths import ROOT

SETTINGS = ROOT / "docs" / "zensical.toml"
LOADED = re.compile(r"<(?:script|link|img)\b[^>]*(?:src|href)=\"?(https?://[^\"\s>]+)")
DIAGRAMS = sorted(
    {
        block[2]
        for page in (ROOT / "docs").rglob("*.md")
        for block in BLOCK.finditer(page.read_text())
        if block[1] == "mermaid"
    }
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("site"), diagrams=False)


@pytest.mark.slow
def test_the_site_builds_without_a_dead_link_and_loads_nothing_from_elsewhere(site: Path):
    pages = {path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert {"index.html", "tutorials/own_env.html", "reference/config.html"} <= pages.keys()
    assert {page: LOADED.findall(text) for page, text in pages.items() if LOADED.findall(text)} == {}


@pytest.mark.slow
def test_generated_pages_name_every_key_command_route_and_name(site: Path):
    expected = {
        "config": ("max_staleness", "actor_train.training_args", "buffer"),
        "cli": ("offbeat train", "offbeat runs why", "--max-steps"),
        "rest": ("GET /runs/{run_id}/why", "RunView"),
        "python": ("offbeat.train", "offbeat.testing.run_episode", "Raises"),
    }
    for page, texts in expected.items():
        shown = re.sub(r"<[^>]+>", "", (site / "reference" / f"{page}.html").read_text(encoding="utf-8"))
        assert [text for text in texts if text not in shown] == [], page


def test_every_page_of_the_navigation_exists_or_is_coming():
    known = {*generate_pages(), *PROJECT.values()}
    assert [page for page in listed_pages(SETTINGS) if page not in known and not (ROOT / "docs" / page).is_file()] == []


def test_a_page_outside_of_the_navigation_is_named(tmp_path: Path):
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "lost.md").write_text("# Lost\n")
    with pytest.raises(SiteError, match=r"lost\.md is in no section of the navigation: add it to `nav`"):
        write_settings(SETTINGS, tmp_path / "pages", tmp_path, ROOT)


def test_a_link_or_picture_that_leads_nowhere_is_named_with_its_line(tmp_path: Path):
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in PROJECT:
        shutil.copy(ROOT / name, tmp_path / name)
        (tmp_path / name).write_text("# Page\n")
    (docs / "page.md").write_text(
        "# Page\n\n[a](none.md)\n![b](img/none.png)\n\n```sh\n[c](code.md)\n```\n[d](page.md#page)\n"
    )
    with pytest.raises(SiteError) as refused:
        stage_pages(tmp_path, tmp_path / "pages", {})
    assert str(refused.value).splitlines() == [
        "docs/page.md:3: none.md does not exist", "docs/page.md:4: img/none.png does not exist",
    ]  # fmt: skip


def test_a_linked_source_becomes_a_page(tmp_path: Path):
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    for name in PROJECT:
        (tmp_path / name).write_text("# Page\n")
    (tmp_path / "code.py").write_text("x = 1\n")
    (tmp_path / "docs" / "deep" / "page.md").write_text(
        "# Page\n\n[code](../../code.py) [safe](../../SECURITY.md#page)\n"
    )
    stage_pages(tmp_path, tmp_path / "pages", {})
    page = (tmp_path / "pages" / "deep" / "page.md").read_text()
    assert "[code](../source/code.py.md) [safe](../security.md#page)" in page
    assert "```python\nx = 1\n" in (tmp_path / "pages" / "source" / "code.py.md").read_text()


def test_warnings_of_the_builder_are_read_with_their_place():
    output = "\x1b[33mWarning:\x1b[0m anchor does not exist\n  \x1b[38m╭─[ rest.md:3:5 ]\n"
    assert read_warnings(output) == ["rest.md:3:5: anchor does not exist"]
    assert read_warnings("Error: no such theme") == ["Error: no such theme"]


def test_a_formula_becomes_mathml():
    text = render_blocks("# F\n\n```math\n\\frac{a}{b}\n```\n", "page.md", None)
    assert "<mfrac>" in text
    assert "```" not in text


@pytest.mark.slow
@pytest.mark.parametrize("source", DIAGRAMS, ids=lambda source: source.split("\n", 1)[0])
def test_every_diagram_is_one_that_mermaid_draws(source: str):
    assert "<svg" in render_diagram(source.strip())
