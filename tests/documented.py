"""What a page of the documentation has its reader write and run.

`python -m tests.documented docs/tutorials/lora.md FOLDER` writes a page's files, and its commands as `commands.sh`.
"""

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^( *)(`{3,})(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^\1\2$", re.MULTILINE | re.DOTALL)
SHELLS = ("sh", "bash", "shell")
OPERATORS = {"|", "||", "&&", ";", "&"}
REDIRECTIONS = {">", ">>", "<", "2>", "2>&1"}


@dataclass(frozen=True)
class Block:
    """Fenced block of a page."""

    language: str
    title: str
    text: str


def read_blocks(page: Path) -> list[Block]:
    return [Block(found[3], found[4] or "", found[5]) for found in FENCE.finditer(page.read_text(encoding="utf-8"))]


def files_of(page: Path) -> dict[str, str]:
    """Return the files that a page lets its reader write: blocks titled with a file's name."""
    return {block.title: block.text for block in read_blocks(page) if block.title and block.language not in SHELLS}


def commands_of(page: Path, *, elsewhere: bool = True) -> Iterator[list[str]]:
    """Yield the words of each command; without `elsewhere` those of the first terminal alone."""
    for block in read_blocks(page):
        if block.language in SHELLS and (elsewhere or not block.title):
            yield from split_commands(block.text)


def split_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell's text, without redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if word in OPERATORS:
                yield from [words] if words else []
                words = []
            elif word in REDIRECTIONS:
                next(lexer, None)
            else:
                words.append(word)
        if words:
            yield words


def main(page: str, folder: str) -> None:
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    blocks = [block for block in read_blocks(Path(page)) if block.language in SHELLS and not block.title]
    files = {**files_of(Path(page)), "commands.sh": "set -ex\n" + "".join(block.text for block in blocks)}
    for name, text in files.items():
        (target / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
