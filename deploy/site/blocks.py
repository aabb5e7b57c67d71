"""Diagrams as SVG and formulas as MathML, drawn when the site is built."""

import hashlib
import html
import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from mermaidx import render

BLOCK = re.compile(r"^```(mermaid|math)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
FOLDER = "diagrams"


class Diagrams:
    """Mermaid diagrams as SVG files, cached by the digest of their source."""

    def __init__(self, pages: Path, kept: Path) -> None:
        self._pages, self._kept = pages, kept

    def draw(self, source: str) -> str:
        """Return the file of a diagram, from the site's root."""
        name = hashlib.sha256(source.encode()).hexdigest()[:16] + ".svg"
        kept, drawn = self._kept / name, self._pages / FOLDER / name
        if not kept.is_file():
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(render_diagram(source), encoding="utf-8")
        drawn.parent.mkdir(parents=True, exist_ok=True)
        drawn.write_bytes(kept.read_bytes())
        return f"{FOLDER}/{name}"


def render_diagram(source: str) -> str:
    return render(source, theme="neutral").svg()


def render_formula(source: str) -> str:
    """Return LaTeX as MathML."""
    return convert(source, display="block")


def render_blocks(text: str, page: str, diagrams: Diagrams | None) -> str:
    """Replace a page's diagrams and formulas; without `diagrams` these stay text."""

    def replace(block: re.Match[str]) -> str:
        kind, source = block[1], block[2].strip()
        if kind == "math":
            return f'<div class="formula">{render_formula(source)}</div>'
        if diagrams is None:
            return block[0].replace("```mermaid", "```text", 1)
        headings = HEADING.findall(text[: block.start()])
        label = html.escape(re.sub(r"[`*\[\]]", "", headings[-1] if headings else "Diagram"))
        file = posixpath.relpath(diagrams.draw(source), posixpath.dirname(page) or ".")
        return f"![Diagram: {label}]({file}){{ .diagram }}"

    return BLOCK.sub(replace, text)
