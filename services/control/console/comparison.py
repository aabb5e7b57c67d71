"""Runs side by side."""

from collections.abc import Sequence

from offbeat.services.control.console.archive import RunArchive
from offbeat.services.control.console.schemas import ComparedRunView, CompareView
from offbeat.services.control.schemas import RunView


def compare(views: Sequence[RunView], archives: Sequence[RunArchive]) -> CompareView:
    configs = [archive.config() for archive in archives]
    keys = sorted({key for config in configs for key in config})
    values = {key: [config.get(key) for config in configs] for key in keys}
    newest = [archive.series([], "step", None, 1) for archive in archives]
    runs = [
        ComparedRunView(
            id=view.id,
            state=view.state,
            step=view.step,
            error=view.error,
            metrics=series.last,
            unread_bytes=series.unread_bytes,
        )
        for view, series in zip(views, newest, strict=True)
    ]
    return CompareView(
        runs=runs, differences={key: each for key, each in values.items() if any(v != each[0] for v in each)}
    )
