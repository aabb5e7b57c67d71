"""Tables of `offbeat bench turn`."""

from typing import Any

from offbeat.benchmarks.harness.result import show
from offbeat.benchmarks.turn.engine_parts import ENGINE_PARTS
from offbeat.benchmarks.turn.worker_parts import WORKER_PARTS

PROCESS_PARTS = {"worker": WORKER_PARTS, "engine": ENGINE_PARTS}


def show_turns(result: dict[str, Any]) -> None:
    levels = result["levels"]
    _show_sides(levels)
    _show_parts(levels)
    idle = result["idle_cpu_ms_per_s"]
    show("CPU while nothing is played, ms a second", tuple(idle), [tuple(idle.values())])


def _show_sides(levels: list[dict[str, Any]]) -> None:
    show(
        "A turn in the mesh and on three floors: turns/s, and CPU in ms a turn",
        ("at a time", *(f"{name} {unit}" for name in levels[0]["sides"] for unit in ("turns/s", "CPU")), "mesh - bare"),
        [
            [
                level["concurrency"],
                *(value for s in level["sides"].values() for value in (s["turns_per_s"].median, s["cpu_ms"].median)),
                level["added_cpu_ms"].median,
            ]
            for level in levels
        ],
    )


def _show_parts(levels: list[dict[str, Any]]) -> None:
    show(
        "By part, in ms a turn",
        ("part", *(f"{level['concurrency']}: {unit}" for level in levels for unit in ("CPU", "wall", "bare CPU"))),
        [
            (name, *(value for level in levels for value in _cells(level["sides"], process, part)))
            for name, process, part in _rows(levels[0]["sides"]["mesh"])
        ],
    )


def _rows(mesh: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (name, process, part); part empty: all of the process."""
    rows: list[tuple[str, str, str]] = []
    for process in mesh["process_cpu_ms"]:
        rows.append((process, process, ""))
        if parts := PROCESS_PARTS.get(process):
            rows += [(f"  {part}", process, part) for part in (*parts, "rest")]
    return rows


def _cells(sides: dict[str, Any], process: str, part: str) -> tuple[float | None, float | None, float | None]:
    bare = sides["bare"] if process == "engine" else None
    of_bare = None if bare is None else _cpu_ms(bare, process, part)
    wall_ms = sides["mesh"]["parts"].get(part, {}).get("wall_ms")
    return _cpu_ms(sides["mesh"], process, part), wall_ms, of_bare


def _cpu_ms(side: dict[str, Any], process: str, part: str) -> float:
    whole = side["process_cpu_ms"][process]
    if part == "rest":
        return whole - sum(side["parts"][each]["cpu_ms"] for each in PROCESS_PARTS[process])
    return side["parts"][part]["cpu_ms"] if part else whole
