"""Documentation site, from a clone of the repository: `python -m offbeat.deploy.site.build`.

A missing page, link, picture or anchor fails the build. The site needs no network.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

from offbeat.deploy.site.navigation import write_settings
from offbeat.deploy.site.reference import generate_pages
from offbeat.deploy.site.staging import SiteError, stage_pages

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "site"
COLORS = re.compile(r"\x1b\[[\d;]*m")
WARNING = re.compile(r"^Warning: (.+)(?:\n\s*╭─\[ (.+?) \])?", re.MULTILINE)


def build_site(out: Path, *, diagrams: bool = True) -> Path:
    """Build the site below `out`; return the folder with index.html.

    Raises:
        SiteError: lists every link, picture and page that is wrong.
    """
    if not (ROOT / "docs" / "zensical.toml").is_file():
        raise SiteError([f"{ROOT} has no docs/zensical.toml: the site is built from a clone of the repository"])
    pages = out / "pages"
    stage_pages(ROOT, pages, generate_pages(), diagrams=diagrams)
    settings = write_settings(ROOT / "docs" / "zensical.toml", pages, out, ROOT / "deploy" / "package")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(settings)]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SiteError(read_warnings(done.stdout + done.stderr))
    return out / "html"


def read_warnings(output: str) -> list[str]:
    """Return Zensical's warnings as `PAGE:LINE:COLUMN: what`, or its whole output."""
    text = COLORS.sub("", output)
    return [f"{found[2]}: {found[1]}" if found[2] else found[1] for found in WARNING.finditer(text)] or [text]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the documentation site.")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the site; default: build/site")
    parser.add_argument("--no-diagrams", action="store_true", help="leave diagrams as text: faster")
    options = parser.parse_args(arguments)
    try:
        html = build_site(options.out.resolve(), diagrams=not options.no_diagrams)
    except SiteError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{html / 'index.html'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
