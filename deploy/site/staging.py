"""Pages of the site in one folder: those of docs/, the repository's other pages, generated ones, and linked sources."""

import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from offbeat.deploy.site.blocks import Diagrams, render_blocks

SOURCES = "source"
"""Folder of linked files' pages."""
PROJECT = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
"""Top-level file -> its page."""
LINK = re.compile(r"(?<=\]\()([^)\s#]+)?(#[^)\s]*)?(?=[)\s])|(?<=src=\")([^\"]+)(?=\")")
FENCE = re.compile(r"^\s*(```+|~~~+)")
LANGUAGES = {".py": "python", ".json": "json", ".yaml": "yaml", ".lua": "lua", ".toml": "toml", ".sh": "sh"}
MAX_SOURCE_BYTES = 400_000


class SiteError(Exception):
    """Failed build, one problem a line."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))


def stage_pages(root: Path, pages: Path, generated: dict[str, str], *, diagrams: bool = True) -> None:
    """Fill the folder `pages`.

    Raises:
        SiteError: dead links or pictures, with page and line.
    """
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(root / "docs", pages, ignore=shutil.ignore_patterns("*.md", "*.toml"))
    drawn = Diagrams(pages, root / "build" / "diagrams") if diagrams else None
    staging = _Staging(root, pages, generated)
    problems: list[str] = []
    for page, name in staging.pages():
        text, wrong = staging.rewrite(page, name)
        problems += wrong
        _write(pages / name, render_blocks(text, name, drawn))
    for name, text in generated.items():
        _write(pages / name, text)
    for source in sorted(staging.sources):
        _write(pages / _source_page(source), _show_source(root, source))
    if problems:
        raise SiteError(problems)


class _Staging:
    """Links between pages, by files of the repository."""

    def __init__(self, root: Path, pages: Path, generated: dict[str, str]) -> None:
        self._root, self._pages, self._generated = root, pages, generated
        self.sources: set[str] = set()

    def pages(self) -> Iterator[tuple[Path, str]]:
        docs = self._root / "docs"
        for page in sorted(docs.rglob("*.md")):
            yield page, page.relative_to(docs).as_posix()
        for name, staged in PROJECT.items():
            yield self._root / name, staged

    def rewrite(self, page: Path, name: str) -> tuple[str, list[str]]:
        """Return a page with the site's links, and the dead links."""
        lines, problems, fence = list[str](), list[str](), ""
        for number, line in enumerate(page.read_text(encoding="utf-8").split("\n"), 1):
            mark = FENCE.match(line)
            if mark and not fence:
                fence = mark[1]
            elif mark and mark[1].startswith(fence):
                fence = ""
            if fence or mark:
                lines.append(line)
                continue
            rewritten, wrong = self._rewrite_line(line, page, name)
            lines.append(rewritten)
            problems += [f"{page.relative_to(self._root)}:{number}: {target} does not exist" for target in wrong]
        return "\n".join(lines), problems

    def _rewrite_line(self, line: str, page: Path, name: str) -> tuple[str, list[str]]:
        wrong: list[str] = []

        def replace(link: re.Match[str]) -> str:
            target = link[1] or link[3]
            if not target or re.match(r"[a-z][a-z0-9+.-]*:", target):
                return link[0]
            path = posixpath.normpath((page.parent.relative_to(self._root) / target).as_posix())
            if path.startswith("..") or not self._exists(path):
                wrong.append(target)
                return link[0]
            return posixpath.relpath(self._staged(path), posixpath.dirname(name) or ".") + (link[2] or "")

        return LINK.sub(replace, line), wrong

    def _exists(self, path: str) -> bool:
        return (self._root / path).exists() or path.removeprefix("docs/") in self._generated

    def _staged(self, path: str) -> str:
        """Return a repository file's path in the site."""
        if path.startswith("docs/"):
            return path.removeprefix("docs/")
        if path == "README.md":
            return "index.md"
        if path not in PROJECT:
            self.sources.add(path)
        return PROJECT.get(path) or _source_page(path)


def _source_page(path: str) -> str:
    return f"{SOURCES}/{path}.md"


def _show_source(root: Path, path: str) -> str:
    """Return the page of a file or folder."""
    source = root / path
    if source.is_dir():
        entries = sorted(each.name for each in source.iterdir() if not each.name.startswith((".", "__")))
        return "\n".join([f"# {path}/", "", *(f"- `{entry}`" for entry in entries), ""])
    if source.stat().st_size > MAX_SOURCE_BYTES:
        return f"# {path}\n\nThe file is too long to be shown here.\n"
    fence = "`" * 6
    language = LANGUAGES.get(source.suffix, "text")
    return f"# {path}\n\n{fence}{language}\n{source.read_text(encoding='utf-8').rstrip()}\n{fence}\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
