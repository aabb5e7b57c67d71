"""Weights & Biases tracker; runs resume by id.

W&B's step is the line number in `metrics.jsonl`, so late evaluations are accepted and repeated rows ignored; charts use
`step`.
"""

import os
from importlib import import_module
from typing import Any, Literal

from offbeat.services.text_samples import to_columns
from offbeat.trainer.trackers.base import (
    Ending,
    Row,
    TrackedRun,
    Tracker,
)


class WeightsAndBiases(Tracker):
    """Passes arguments to `wandb.init`; API key from WANDB_API_KEY or `wandb login`."""

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
        """name: default `exp_name`. settings: fields of `wandb.Settings`."""
        wandb: Any = import_module("wandb")

        self._wandb = wandb
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
            # Report the resource usage of the parent process, the learner
            settings=wandb.Settings(**{"console": "off", "x_stats_pid": os.getppid(), **(settings or {})}),
        )
        self._run.config.update(dict(run.config), allow_val_change=True)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self.place = self._run.settings.sync_dir if self._run.offline else (self._run.url or "")

    def write(self, row: Row) -> None:
        if row.values or row.samples:
            self._run.log({"step": row.step, **row.values, **self._table(row)}, step=row.number, commit=True)

    def _table(self, row: Row) -> dict[str, Any]:
        if not row.samples:
            return {}
        columns = to_columns(row.samples)
        data = [list(values) for values in zip(*columns.values(), strict=True)]
        return {"samples": self._wandb.Table(columns=list(columns), data=data)}

    def close(self, ending: Ending) -> None:
        self._run.finish(exit_code=1 if ending == "died" else 0)
