"""Weights & Biases: the run of a resumed learner goes on under its id.

W&B's own step is the line in `metrics.jsonl`, which grows over all lives, so an evaluation that ends after later steps were
trained is not refused, and a row that is offered again is: charts are drawn over `step`.
"""

import os
from importlib import import_module
from typing import Any, Literal

from offbeat.trainer.trackers.base import (
    Ending,
    Row,
    TrackedRun,
    Tracker,
)


class WeightsAndBiases(Tracker):
    """`wandb.init` takes what is told here by the same name; the API key comes from WANDB_API_KEY or `wandb login`."""

    def __init__(
        self,
        run: TrackedRun,
        *,
        project: str = "offbeat",
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: list[str] | None = None,
        notes: str | None = None,
        mode: Literal["online", "offline", "disabled", "shared"] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """name: `exp_name` if left out. settings: fields of `wandb.Settings`."""
        wandb: Any = import_module("wandb")

        self._run: Any = wandb.init(
            project=project,
            entity=entity,
            name=name or run.name,
            group=group,
            job_type=job_type,
            tags=tags,
            notes=notes,
            mode=mode,
            dir=str(run.folder),
            id=run.key,
            resume="allow",
            # Usage is that of the learner, which has started this process
            settings=wandb.Settings(**{"console": "off", "x_stats_pid": os.getppid(), **(settings or {})}),
        )
        self._run.config.update(dict(run.config), allow_val_change=True)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self.place = self._run.settings.sync_dir if self._run.offline else (self._run.url or "")

    def write(self, row: Row) -> None:
        if row.values:
            self._run.log({"step": row.step, **row.values}, step=row.number, commit=True)

    def close(self, ending: Ending) -> None:
        self._run.finish(exit_code=1 if ending == "died" else 0)
