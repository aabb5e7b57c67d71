"""A run's history beside its metrics, so that a resumed run and its report read only newer records.

Invariant: `history.msgpack` is used only with the metrics file from which it was made; without it all metrics are read.
"""

import logging
import os
from array import array
from collections import deque
from pathlib import Path

import msgspec

from offbeat.deploy.report.history import EvaluationResult, RunHistory, Step
from offbeat.services.telemetry import Partial
from offbeat.services.text_samples import TextSample
from offbeat.trainer.trackers.metrics_file import METRICS_FILE, find_offset, id_before, read_metrics

logger = logging.getLogger(__name__)

HISTORY_FILE = "history.msgpack"
PART = f".{HISTORY_FILE}.part"
FORMAT = 1
"""Raised when records are counted in another way."""


class SavedHistory(msgspec.Struct):
    format: int
    offset: int
    """Of the metrics file, in bytes, up to which records are counted."""
    id_before: str
    """Record that ends there."""
    position: str
    numbers: bytes
    times: bytes
    columns: dict[str, bytes]
    last_step: Step | None
    samples: tuple[TextSample, ...]
    evaluations: list[EvaluationResult]
    totals: dict[str, float]
    peaks: dict[str, float]
    means: dict[str, Partial]
    attempts: list[tuple[float, float]]
    recent: dict[str, list[tuple[float, float]]]
    now: float
    window: list[Step]


def read_history_file(folder: Path, history: RunHistory) -> None:
    """Read a run's metrics into an empty history, from the end of what is saved of them."""
    offset = _restore(folder, history)
    history.add(read_metrics(folder / METRICS_FILE, offset, history.position))


def count_unread_bytes(folder: Path) -> int:
    """Return the bytes of metrics that `read_history_file` reads."""
    saved, path = _read_saved(folder), folder / METRICS_FILE
    size = path.stat().st_size if path.exists() else 0
    return size - (0 if saved is None else saved.offset)


def save_history(folder: Path, history: RunHistory) -> None:
    """Save a history as far as the folder's metrics have it.

    A full disk, or a text with half of a surrogate pair, leaves the earlier one.
    """
    path = folder / METRICS_FILE
    try:
        offset = find_offset(path, history.position)
        if not offset:
            return
        columns, part = history.steps.columns(), folder / PART
        saved = SavedHistory(
            format=FORMAT,
            offset=offset,
            id_before=id_before(path, offset),
            position=history.position,
            numbers=history.steps.numbers.tobytes(),
            times=history.steps.times.tobytes(),
            columns={name: column.tobytes() for name, column in columns.items()},
            last_step=history.last_step,
            samples=history.samples,
            evaluations=list(history.evaluations.values()),
            totals=history.totals,
            peaks=history.peaks,
            means=history.means,
            attempts=history.attempts,
            recent={key: list(values) for key, values in history.recent.items()},
            now=history.now,
            window=history.steps_of_window,
        )
        part.write_bytes(msgspec.msgpack.encode(saved))
        os.replace(part, folder / HISTORY_FILE)
    except (OSError, UnicodeEncodeError) as error:
        logger.warning(
            "%s can't be written: %s; a resumed run reads the metrics since the earlier one", HISTORY_FILE, error
        )


def _read_saved(folder: Path) -> SavedHistory | None:
    """Return what is saved, if it is of this build and of the folder's metrics."""
    try:
        saved = msgspec.msgpack.decode((folder / HISTORY_FILE).read_bytes(), type=SavedHistory)
        is_current = saved.format == FORMAT and set(saved.columns) == set(RunHistory().steps.columns())
        is_of_file = is_current and id_before(folder / METRICS_FILE, saved.offset) == saved.id_before
    except (OSError, msgspec.MsgspecError):
        return None
    return saved if is_of_file else None


def _restore(folder: Path, history: RunHistory) -> int:
    """Restore an empty history and return the offset up to which it has the metrics."""
    saved = _read_saved(folder)
    if saved is None:
        return 0
    history.position = saved.position
    history.steps.restore(
        array("q", saved.numbers), array("d", saved.times), {n: array("d", c) for n, c in saved.columns.items()}
    )
    history.last_step, history.samples = saved.last_step, saved.samples
    history.evaluations = {(each.kind, each.sampling, each.step): each for each in saved.evaluations}
    history.totals, history.peaks, history.means = saved.totals, saved.peaks, saved.means
    history.attempts, history.now = saved.attempts, saved.now
    history.recent = {key: deque(values) for key, values in saved.recent.items()}
    history.steps_of_window = saved.window
    return saved.offset
