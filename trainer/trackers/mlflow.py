"""MLflow tracker; a tag finds the run to resume.

MLflow keeps one value per name, time and step.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from offbeat.services.text_samples import to_columns
from offbeat.trainer.trackers.base import (
    Ending,
    Row,
    TrackedRun,
    Tracker,
)

KEY_TAG = "offbeat.key"
INVALID_NAME_CHARS = re.compile(r"[^\w\-. /:]")
"""In metric and parameter names."""
MAX_METRICS, MAX_PARAMS = 1000, 100
"""Limits of one `log_batch` call."""
MAX_VALUE_CHARS = 6000
STATUS: Mapping[Ending, str] = {"finished": "FINISHED", "stopped": "KILLED", "died": "FAILED"}


class MLflow(Tracker):
    """Rows as metrics, configuration as parameters by dotted path."""

    def __init__(
        self,
        run: TrackedRun,
        *,
        tracking_uri: str | None = None,
        experiment_name: str = "offbeat",
        run_name: str | None = None,
        tags: dict[str, str] | None = None,
    ) -> None:
        """tracking_uri: default MLFLOW_TRACKING_URI, else SQLite in the tracker's folder. run_name: default `exp_name`."""
        mlflow: Any = import_module("mlflow")
        self._entities: Any = import_module("mlflow.entities")
        own = None if tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") else run.folder
        uri = f"sqlite:///{own}/mlflow.db" if own else tracking_uri
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        existing = self._client.get_experiment_by_name(experiment_name)
        artifacts = (own / "artifacts").as_uri() if own else None
        experiment = existing.experiment_id if existing else self._client.create_experiment(experiment_name, artifacts)
        self._run_id = self._open(run, experiment, run_name or run.name, tags or {})
        self.place = f"{uri or os.environ['MLFLOW_TRACKING_URI']}, run {self._run_id}"

    def write(self, row: Row) -> None:
        time_ms = int(row.time * 1000)
        metrics = [
            self._entities.Metric(INVALID_NAME_CHARS.sub("_", name), value, time_ms, row.step)
            for name, value in row.values.items()
        ]
        for batch in _batched(metrics, MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=batch)
        if row.samples:
            # `log_table` lists all tables in a tag, whose length is bounded, and appends to a table that is sent again
            columns = to_columns(row.samples)
            table = {"columns": list(columns), "data": list(zip(*columns.values(), strict=True))}
            self._client.log_dict(self._run_id, table, f"samples/step-{row.step}.json")

    def close(self, ending: Ending) -> None:
        self._client.set_terminated(self._run_id, STATUS[ending])

    def _open(self, run: TrackedRun, experiment: str, name: str, tags: Mapping[str, str]) -> str:
        """Find or create the run; changed parameters, which are immutable, become tags."""
        matches = self._client.search_runs([experiment], f"tags.`{KEY_TAG}` = '{run.key}'", max_results=1)
        if matches:
            self._client.update_run(matches[0].info.run_id, status="RUNNING")
        opened = matches[0] if matches else self._client.create_run(experiment, None, {**tags, KEY_TAG: run.key}, name)
        config = dict(_flatten(run.config))
        new = [self._entities.Param(key, value) for key, value in config.items() if key not in opened.data.params]
        for batch in _batched(new, MAX_PARAMS):
            self._client.log_batch(opened.info.run_id, params=batch)
        for key, value in config.items():
            if opened.data.params.get(key, value) != value:
                self._client.set_tag(opened.info.run_id, f"resumed.{key}", value)
        return str(opened.info.run_id)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        path = INVALID_NAME_CHARS.sub("_", f"{prefix}{key}")
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{path}.")
        else:
            yield path, str(value)[:MAX_VALUE_CHARS]


def _batched(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
