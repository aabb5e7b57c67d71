"""Settings of Zensical: docs/zensical.toml with a build's paths and existing pages."""

import json
import re
from pathlib import Path

from offbeat.deploy.site.staging import SOURCES, SiteError

PAGE = re.compile(r'"([\w./-]+\.md)"')


def write_settings(template: Path, pages: Path, out: Path, package: Path) -> Path:
    """Write a build's settings; return the file.

    Raises:
        SiteError: a page is in no section of the navigation.
    """
    kept, listed = [], set[str]()
    for line in template.read_text(encoding="utf-8").splitlines():
        page = PAGE.search(line)
        if page is None or (pages / page[1]).is_file():
            kept.append(line)
            listed |= {page[1]} if page else set()
    existing = {path.relative_to(pages).as_posix() for path in pages.rglob("*.md")}
    unlisted = sorted(page for page in existing - listed if not page.startswith(f"{SOURCES}/"))
    if unlisted:
        raise SiteError(
            [f"{page} is in no section of the navigation: add it to `nav` in {template}" for page in unlisted]
        )
    text = "\n".join(kept).replace("[project]", _paths(pages), 1)
    settings = out / "zensical.toml"
    settings.write_text(text.replace("{package}", str(package)) + "\n", encoding="utf-8")
    return settings


def listed_pages(template: Path) -> list[str]:
    """Return the pages of the navigation, also missing ones."""
    return PAGE.findall(template.read_text(encoding="utf-8"))


def _paths(pages: Path) -> str:
    return f'[project]\ndocs_dir = {json.dumps(pages.name)}\nsite_dir = "html"'
