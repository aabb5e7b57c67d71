"""SwanLab tracker; online runs resume by id.

SwanLab keeps the first value per name and step, thus one of several service gauges between steps.
"""

from importlib import import_module
from typing import Any, Literal

from offbeat.services.text_samples import to_text
from offbeat.trainer.trackers.base import (
    Ending,
    Row,
    TrackedRun,
    Tracker,
)

STATE: dict[Ending, str] = {"finished": "success", "stopped": "aborted", "died": "crashed"}


class SwanLab(Tracker):
    """Passes arguments to `swanlab.init`; API key from SWANLAB_API_KEY or `swanlab login`."""

    def __init__(
        self,
        run: TrackedRun,
        *,
        project: str = "offbeat",
        workspace: str | None = None,
        experiment_name: str | None = None,
        description: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: list[str] | None = None,
        public: bool | None = None,
        mode: Literal["online", "local", "offline", "disabled"] | None = None,
    ) -> None:
        """experiment_name: default `exp_name`."""
        swanlab: Any = import_module("swanlab")

        self._swanlab = swanlab
        self._run: Any = swanlab.init(
            project=project,
            workspace=workspace,
            name=experiment_name or run.name,
            description=description,
            group=group,
            job_type=job_type,
            tags=tags,
            public=public,
            mode=mode,
            log_dir=str(run.folder),
            id=run.key,
            resume="allow",
            config=dict(run.config),
        )
        try:
            self.place = str(self._run.url)
        except ValueError:  # not online
            self.place = str(run.folder)

    def write(self, row: Row) -> None:
        texts = {f"samples/{i}": self._swanlab.Text(to_text(sample)) for i, sample in enumerate(row.samples)}
        if row.values or texts:
            self._run.log({**row.values, **texts}, step=row.step)

    def close(self, ending: Ending) -> None:
        self._run.finish(state=STATE[ending], error="the learner died" if ending == "died" else None)
