"""All benchmarks in one call: a JSON document and a page of their tables.

Each benchmark is a process of its own. Results of the same build and command are kept, so that an interrupted call is
continued.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from offbeat.benchmarks.harness.result import build

BENCHES = {
    "buffer": ("--no-reverb",),
    "scale": (),
    "generation": (),
    "turn": (),
    "weights": (),
    "learner": (),
    "trees": (),
    "async": (),
    "redundancy": (),
    "plan": (),
    "tenants": (),
    "console": (),
}
"""Benchmark -> its options. Without `peer`, whose runs take hours and need TRL's environment."""
SUMMARY, PAGE = "summary.json", "benchmarks.md"


class SuiteError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    folder: Path
    only: tuple[str, ...]
    quick: bool = False
    fresh: bool = False


def parse_names(text: str) -> tuple[str, ...]:
    """Return the benchmarks of a list with commas; empty: all. Raises SuiteError."""
    names = tuple(name for part in text.split(",") if (name := part.strip()))
    if unknown := [name for name in names if name not in BENCHES]:
        raise SuiteError(f"--only: no benchmark {', '.join(unknown)}; there are {', '.join(BENCHES)}")
    return names or tuple(BENCHES)


def run(options: SuiteOptions) -> dict[str, str]:
    """Run the benchmarks, write the summary and its page, and return why others failed."""
    options.folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    for place, name in enumerate(options.only, 1):
        label = f"{place}/{len(options.only)} {name}"
        if not options.fresh and _is_measured(options, name):
            typer.echo(f"{label}: kept, {_file(options, name)} is of this build")
            continue
        typer.echo(label)
        if complaint := _measure(options, name):
            failed[name] = complaint
            typer.echo(f"{label}: failed, {complaint}", err=True)
    _write(options, failed)
    return failed


def _file(options: SuiteOptions, name: str) -> Path:
    return options.folder / f"{name}.json"


def _command(options: SuiteOptions, name: str) -> list[str]:
    return ["offbeat", "bench", name, *BENCHES[name], *(["--quick"] if options.quick else [])]


def _is_measured(options: SuiteOptions, name: str) -> bool:
    try:
        stored = json.loads(_file(options, name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return (stored.get("build"), stored.get("command")) == (build(), _command(options, name)) and "+" not in build()


def _measure(options: SuiteOptions, name: str) -> str:
    """Return why it failed, or an empty string."""
    file, log = _file(options, name), options.folder / f"{name}.log"
    file.unlink(missing_ok=True)
    command = _command(options, name)
    program = [sys.executable, "-m", "offbeat.deploy.cli.app", *command[1:], "--json", str(file)]
    with log.open("w", encoding="utf-8") as output:
        status = subprocess.run(program, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False)
    if status.returncode or not file.exists():
        return f"exit status {status.returncode}, see {log}"
    result = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**result, "command": command}, indent=2) + "\n", encoding="utf-8")
    return ""


def _write(options: SuiteOptions, failed: dict[str, str]) -> None:
    measured = {
        name: json.loads(_file(options, name).read_text(encoding="utf-8"))
        for name in options.only
        if name not in failed
    }
    summary = {"build": build(), "quick": options.quick, "failed": failed, "benchmarks": measured}
    (options.folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (options.folder / PAGE).write_text("\n".join(page(list(measured.values()))) + "\n", encoding="utf-8")
    typer.echo(f"{options.folder / SUMMARY}, {options.folder / PAGE}")


def page(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown page: each benchmark's command, build, machine, load and tables."""
    yield "# Benchmarks"
    for result in results:
        machine, day = result["machine"], result["measured_at"][:10]
        yield from (
            "",
            f"## {result['bench']}",
            "",
            f"`{' '.join(result['command'])}`, build {result['build']}, {day}: {machine['cpus']} cores of "
            f"{machine['cpu'] or 'an unknown processor'}, load {machine['load'][0]:g} at the end.",
        )
        for table in result["tables"]:
            yield from ("", f"{table['title']}:", "", _row(table["columns"]), _row(["---"] * len(table["columns"])))
            yield from (_row(row) for row in table["rows"])


def _row(cells: Sequence[str]) -> str:
    escaped = (each.replace("|", r"\|") for each in cells)
    return f"| {' | '.join(escaped)} |"
