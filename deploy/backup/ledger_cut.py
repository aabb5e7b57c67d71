"""Ledgers up to a Redis dump."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from offbeat.services.buffer.group_ledger import LifeEvent, parse_event


def complete_lines(content: bytes) -> bytes:
    """Return the content without an incomplete last line."""
    return content[: content.rfind(b"\n") + 1]


def cut_events(content: bytes, newest_id: str) -> bytes:
    """Return the lines up to event `newest_id`."""
    newest = LifeEvent(newest_id or "0", 0, 0, "", "").sort_key
    kept: list[bytes] = []
    for line in complete_lines(content).splitlines(keepends=True):
        event = parse_event(_row(line))
        if event is None or event.sort_key <= newest:
            kept.append(line)
    return b"".join(kept)


def newest_group(content: bytes) -> int:
    """Return the highest group number in the journal, or -1."""
    return max(_numbers(content), default=-1)


def _numbers(content: bytes) -> Iterator[int]:
    for line in complete_lines(content).splitlines():
        for row in _row(line).get("groups") or ():
            with suppress(ValueError, TypeError, LookupError):
                yield int(row[0])


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
