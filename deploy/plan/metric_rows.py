"""Metric records that a plan measures."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.services.metric_registry import current_names
from offbeat.trainer.trackers.metrics_file import read_records

STEP_PARTS = ("wait", "train", "publish")
"""Measured parts of a step's time."""
MEASURED = {
    "learner": frozenset(
        (
            "time/step_s",
            *(f"time/{name}_s" for name in STEP_PARTS),
            "tokens/computed",
            "trajectories",
            "groups",
            "groups_without_signal",
            "staleness",
        )
    ),
    "rollout": frozenset(("playing", "turns", "generation_s", "env_s", "episodes", "episode_s", "cpu_s")),
    "generation": frozenset(("load_s", "pause_s")),
}
"""Source -> its metrics that are read, beside those of dropped groups."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """Line of `metrics.jsonl`."""

    time: float
    source: str
    values: Mapping[str, float]
    step: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


def read_rows(path: Path, offset: int = 0) -> Iterator[MetricRow]:
    """Yield what is measured of a run's metric records, each once, without non-finite values.

    A run of a day has millions of records. offset: of the first line, in bytes.
    """
    known: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    for record in read_records(path, offset):
        source = sys.intern(record["source"])
        measured = MEASURED.get(source, frozenset())
        stored = current_names(source, record["values"])
        values = {
            sys.intern(name): value
            for name, value in stored.items()
            if value is not None and (name in measured or is_drop(name))
        }
        if values or source == "generation":  # whose replicas are counted
            labels = known.setdefault(tuple(record["labels"].items()), record["labels"])
            yield MetricRow(record["time"], source, values, record["step"], labels)


def is_drop(name: str) -> bool:
    return name.startswith("groups_dropped/")
