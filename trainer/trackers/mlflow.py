"""MLflow: the run of a resumed learner is found by a tag, and goes on.

MLflow keeps one value per name, time and step: a row that is offered again changes nothing.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from offbeat.trainer.trackers.base import (
    Ending,
    Row,
    TrackedRun,
    Tracker,
)

KEY_TAG = "offbeat.key"
NO_NAME = re.compile(r"[^\w\-. /:]")
"""What MLflow refuses in the name of a metric or parameter."""
MAX_METRICS, MAX_PARAMS = 1000, 100
"""Of one call."""
MAX_VALUE_CHARS = 6000
STATUS: Mapping[Ending, str] = {"finished": "FINISHED", "stopped": "KILLED", "died": "FAILED"}


class MLflow(Tracker):
    """Evaluations and steps are metrics, the configuration is parameters, by their dotted path."""

    def __init__(
        self,
        run: TrackedRun,
        *,
        tracking_uri: str | None = None,
        experiment_name: str = "offbeat",
        run_name: str | None = None,
        tags: dict[str, str] | None = None,
    ) -> None:
        """tracking_uri: MLFLOW_TRACKING_URI if left out, else a SQLite file in the run's folder. run_name: `exp_name` if
        left out."""
        mlflow: Any = import_module("mlflow")
        self._entities: Any = import_module("mlflow.entities")
        own = None if tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") else run.folder
        uri = f"sqlite:///{own}/mlflow.db" if own else tracking_uri
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(experiment_name)
        artifacts = (own / "artifacts").as_uri() if own else None
        experiment = found.experiment_id if found else self._client.create_experiment(experiment_name, artifacts)
        self._run_id = self._open(run, experiment, run_name or run.name, tags or {})
        self.place = f"{uri or os.environ['MLFLOW_TRACKING_URI']}, run {self._run_id}"

    def write(self, row: Row) -> None:
        at = int(row.time * 1000)
        metrics = [
            self._entities.Metric(NO_NAME.sub("_", name), value, at, row.step) for name, value in row.values.items()
        ]
        for some in _batched(metrics, MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=some)

    def close(self, ending: Ending) -> None:
        self._client.set_terminated(self._run_id, STATUS[ending])

    def _open(self, run: TrackedRun, experiment: str, name: str, tags: Mapping[str, str]) -> str:
        """The id of the run, which is made unless it is there; parameters keep their first values, as MLflow demands."""
        found = self._client.search_runs([experiment], f"tags.`{KEY_TAG}` = '{run.key}'", max_results=1)
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
        opened = found[0] if found else self._client.create_run(experiment, None, {**tags, KEY_TAG: run.key}, name)
        told = dict(_flat(run.config))
        fresh = [self._entities.Param(key, value) for key, value in told.items() if key not in opened.data.params]
        for some in _batched(fresh, MAX_PARAMS):
            self._client.log_batch(opened.info.run_id, params=some)
        for key, value in told.items():
            if opened.data.params.get(key, value) != value:
                self._client.set_tag(opened.info.run_id, f"resumed.{key}", value)
        return str(opened.info.run_id)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        path = NO_NAME.sub("_", f"{prefix}{key}")
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}.")
        else:
            yield path, str(value)[:MAX_VALUE_CHARS]


def _batched(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]
