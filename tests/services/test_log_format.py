"""Lines of JSON: one record each, with what they are about."""

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offbeat.services import log_format
from offbeat.services.log_format import LOG_FORMAT_VARIABLE, set_process_log_fields, set_task_log_fields
from offbeat.services.telemetry import configure_logging

logger = logging.getLogger("offbeat.test")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where logs go, with the process's own handlers and fields put back at the end."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    monkeypatch.setattr(log_format, "_process_fields", {})
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "json")
    yield tmp_path
    for handler in root.handlers:
        handler.close()
    root.handlers = handlers
    root.setLevel(level)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "worker.log").read_text().splitlines()]


def test_a_record_is_one_line_with_time_source_and_message(folder: Path):
    configure_logging("worker", folder)
    set_process_log_fields(run="lake", step=3)
    set_process_log_fields(step=4, version=2)
    logger.warning("two\nlines of %s", "\ud800 text")
    (line,) = lines(folder)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "WARNING",
        "service": "worker",
        "logger": "offbeat.test",
        "message": "two\nlines of \ud800 text",
        "run": "lake",
        "step": 4,
        "version": 2,
    }


def test_a_traceback_is_in_the_line_of_its_record(folder: Path):
    configure_logging("worker", folder)
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("failed")
    (line,) = lines(folder)
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: broken")


async def test_each_task_has_fields_of_its_own(folder: Path):
    configure_logging("worker", folder)

    async def play(group: int) -> None:
        set_task_log_fields(group=group)
        await asyncio.sleep(0)
        logger.info("played")
        await asyncio.create_task(step())

    async def step() -> None:
        set_task_log_fields(version=7)
        logger.info("stepped")

    await asyncio.gather(*(asyncio.create_task(play(group)) for group in range(3)))
    logger.info("done")
    found = lines(folder)
    assert sorted(line["group"] for line in found if line["message"] == "played") == [0, 1, 2]
    assert sorted((line["group"], line["version"]) for line in found if line["message"] == "stepped") == [
        (group, 7) for group in range(3)
    ]
    assert "group" not in found[-1]


def test_without_the_variable_lines_are_text(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(LOG_FORMAT_VARIABLE)
    configure_logging("worker", folder)
    logger.info("plain \ud83d")
    assert (folder / "worker.log").read_text().endswith(" INFO    offbeat.test: plain \\ud83d\n")


async def test_text_of_a_task_names_its_run_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(LOG_FORMAT_VARIABLE)
    configure_logging("worker", folder)

    async def serve(run: str) -> None:
        set_task_log_fields(run=run)
        logger.info("serves version 3")
        logger.info("serves run %s", run)

    await asyncio.gather(asyncio.create_task(serve("lake")), asyncio.create_task(serve("pond")))
    logger.info("ready")
    said = [line.partition("offbeat.test: ")[2] for line in (folder / "worker.log").read_text().splitlines()]
    assert said == [
        "run lake: serves version 3",
        "serves run lake",
        "run pond: serves version 3",
        "serves run pond",
        "ready",
    ]
