"""Log lines as text, or as JSON (`OFFBEAT_LOG_FORMAT=json`) with their run, group, step and version.

Lines of a process that serves several runs name the run in either form.
"""

import json
import logging
import os
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime

LOG_FORMAT_VARIABLE = "OFFBEAT_LOG_FORMAT"
JSON_FORMAT = "json"
TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

LogField = str | int

_process_fields: dict[str, LogField] = {}
_task_fields: ContextVar[dict[str, LogField]] = ContextVar("log_fields", default={})  # noqa: B039 - never changed in place


def set_process_log_fields(**fields: LogField) -> None:
    """Add fields to later lines of this process."""
    _process_fields.update(fields)


def set_task_log_fields(**fields: LogField) -> None:
    """Add fields to later lines of the current asyncio task and those that it starts."""
    _task_fields.set({**_task_fields.get(), **fields})


def log_fields_setter(*, is_shared: bool) -> Callable[..., None]:
    """Return what sets a run's fields. is_shared: other runs log in this process, too."""
    return set_task_log_fields if is_shared else set_process_log_fields


def make_formatter(service: str) -> logging.Formatter:
    is_json = os.environ.get(LOG_FORMAT_VARIABLE, "").lower() == JSON_FORMAT
    return JsonFormatter(service) if is_json else TextFormatter(TEXT_FORMAT)


class TextFormatter(logging.Formatter):
    """Text, which begins with the task's run unless the message names it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - of the base class
        run = _task_fields.get().get("run")
        if run is not None and f"run {run}" not in record.message:
            record.message = f"run {run}: {record.message}"
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """`time` (UTC), `level`, `service`, `logger`, `message`, the fields, and `exception`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, LogField] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_process_fields,
            **_task_fields.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
