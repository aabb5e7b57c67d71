"""Trackio tracker: local, self-hosted, or in a Hugging Face Space.

Trackio identifies runs by name: `exp_name` and the key's start.
"""

import os
from importlib import import_module
from typing import Any

from offbeat.services.text_samples import to_columns
from offbeat.trainer.trackers.base import (
    Ending,
    Row,
    TrackedRun,
    Tracker,
)


class Trackio(Tracker):
    """Passes arguments to `trackio.init`."""

    def __init__(
        self,
        run: TrackedRun,
        *,
        project: str = "offbeat",
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        dataset_id: str | None = None,
        bucket_id: str | None = None,
        server_url: str | None = None,
        private: bool | None = None,
        auto_log_gpu: bool | None = None,
        gpu_log_interval: float = 10.0,
    ) -> None:
        if space_id is not None:
            os.environ.pop("HF_HUB_OFFLINE", None)  # the learner sets it, for its models
        trackio: Any = import_module("trackio")

        self._trackio = trackio
        self._run: Any = trackio.init(
            project=project,
            name=f"{name or run.name}-{run.key[:6]}",
            group=group,
            space_id=space_id,
            dataset_id=dataset_id,
            bucket_id=bucket_id,
            server_url=server_url,
            private=private,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=auto_log_gpu,
            gpu_log_interval=gpu_log_interval,
        )
        self.place = f"{space_id or server_url or 'trackio show'}, project {project}, run {self._run.name}"

    def write(self, row: Row) -> None:
        table = {"samples": self._make_table(row)} if row.samples else {}
        if row.values or table:
            self._run.log({**row.values, **table}, step=row.step)

    def _make_table(self, row: Row) -> Any:
        pandas: Any = import_module("pandas")  # a dependency of Trackio
        return self._trackio.Table(dataframe=pandas.DataFrame(to_columns(row.samples)))

    def close(self, ending: Ending) -> None:
        del ending
        self._run.finish()
