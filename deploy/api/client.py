"""Blocking client of the control service's REST API."""

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import pandas as pd

from offbeat.deploy.config.loader import compose_document
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.saving import to_saved_tree
from offbeat.deploy.token_file import find_token, is_remote
from offbeat.services.control.client import ControlClient
from offbeat.services.control.console.schemas import (
    Axis,
    CompareView,
    ReproductionState,
    ReproductionView,
    TrajectoryView,
)
from offbeat.services.control.schemas import DeletedView, RunView, WhyView

T = TypeVar("T")
PAGE = 2000
GROUPS_PAGE = 500
POLL_S = 1.0


def connect(url: str = "http://127.0.0.1:8000", *, token: str | None = None) -> "Client":
    """Return a client of the control service; makes no request.

    token: None takes that of a mesh deployed from this folder on this machine, if any.
    """
    return Client(url, token=token or find_token(url))


class Client:
    """Runs of a deployed mesh; works in notebooks.

    Methods raise `ControlRefusedError` for refused calls and `RetryableError` for an unreachable service.
    """

    def __init__(self, url: str, *, token: str | None = None) -> None:
        self.url = url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="offbeat client", daemon=True)
        self._thread.start()
        self._client = self._call(self._connect(url, token))

    @staticmethod
    async def _connect(url: str, token: str | None) -> ControlClient:
        return ControlClient(url, token=token)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; idempotent."""
        if self._thread.is_alive():
            self._call(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def create(self, config: RunConfig | str | Path, overrides: Sequence[str] = ()) -> RunView:
        """Start a run.

        config: a YAML file, for which the mesh chooses devices, or a configuration, which `load_config` has fitted to this
        machine. overrides: `key=value`, with a file.

        Raises:
            ConfigError: the file is unreadable.
        """
        return self._call(self._client.create(self._to_document(config, overrides)))

    def validate(self, config: RunConfig | str | Path, overrides: Sequence[str] = ()) -> None:
        """Check whether a run could start; see `create`."""
        self._call(self._client.validate(self._to_document(config, overrides)))

    def list(self, *, states: Sequence[str] = (), name: str = "*") -> "list[str]":
        """Return ids, newest first. states: `running`, `finished`, ...; name: a glob."""
        ids: list[str] = []
        after: str | None = None
        while True:
            page = self._call(self._client.runs(states=states, name=name, after=after))
            ids += [run.id for run in page.runs]
            after = page.next
            if after is None:
                return ids

    def show(self, run_id: str) -> RunView:
        """Return a run's state."""
        return self._call(self._client.show(run_id))

    def change(self, run_id: str, **settings: float) -> RunView:
        """Change live settings: `learning_rate`, `temperature`, `max_staleness`, `num_env_groups`, `num_workers`, ..."""
        values: Mapping[str, float] = settings
        return self._call(self._client.change(run_id, values))

    def pause(self, run_id: str) -> RunView:
        """Start no episode or step until `resume`."""
        return self._call(self._client.pause(run_id))

    def resume(self, run_id: str) -> RunView:
        """Resume a paused run."""
        return self._call(self._client.resume(run_id))

    def stop(self, run_id: str, *, now: bool = False) -> RunView:
        """Stop a run after its step, or `now`."""
        return self._call(self._client.stop(run_id, now=now))

    def delete(self, run_id: str, *, files: bool = False) -> DeletedView:
        """Remove an ended run's record, and optionally its files."""
        return self._call(self._client.delete(run_id, files=files))

    def why(self, run_id: str) -> WhyView:
        """Return which component waits for which."""
        return self._call(self._client.why(run_id))

    def metrics(self, run_id: str, source: str | None = "learner") -> pd.DataFrame:
        """Return metric records; see `Run.metrics`."""
        rows: list[dict[str, Any]] = []
        position = "0"
        while True:
            page = self._call(self._client.metrics(run_id, after=position, limit=PAGE))
            for entry in page.records:
                record = entry.record()
                position = entry.id
                if record.values and (source is None or record.source == source):
                    labels = {f"label.{name}": value for name, value in record.labels.items()}
                    values = {name: partial.value for name, partial in record.values.items()}
                    rows.append({"time": record.time, "source": record.source, "step": record.step, **labels, **values})
            if len(page.records) < PAGE:
                return pd.DataFrame(rows)

    def groups(self, run_id: str, **filters: Any) -> pd.DataFrame:
        """Return what became of groups, a row each. filters: `state`, `tag`, `step`, `min_reward`, `sort`, ..."""
        rows: list[dict[str, Any]] = []
        offset: int | None = 0
        while offset is not None:
            page = self._call(self._client.groups(run_id, **{"limit": GROUPS_PAGE, **filters, "offset": offset}))
            rows += [group.model_dump(mode="json") for group in page.groups]
            offset = page.next
        return pd.DataFrame(rows)

    def trajectory(self, run_id: str, group: int, index: int) -> TrajectoryView:
        """Return a recorded trajectory: turns, text, tokens, and what the learner made of each."""
        return self._call(self._client.trajectory(run_id, group, index))

    def series(self, run_id: str, *names: str, axis: Axis = "step", points: int = 1000) -> pd.DataFrame:
        """Return metrics (`learner/reward`) by step, time or trajectories; downsampled ones have gaps."""
        series = self._call(self._client.series(run_id, names, axis=axis, points=points)).series
        columns = {name: pd.Series(each.values, index=each.x) for name, each in series.items()}
        return pd.DataFrame({name: column[~column.index.duplicated(keep="last")] for name, column in columns.items()})

    def compare(self, *run_ids: str) -> CompareView:
        """Return newest metrics of runs, and the configuration keys in which they differ."""
        return self._call(self._client.compare(run_ids))

    def fork(self, run_id: str, step: int, **changes: Any) -> RunView:
        """Start a run from the checkpoint of a step.

        changes: configuration keys, nested (`rollout={"num_workers": 2}`); `exp_name` names the run.
        """
        return self._call(self._client.fork(run_id, step, changes))

    def reproduce(self, run_id: str, step: int) -> ReproductionView:
        """Train recorded steps again, up to `step`, and return whether the weights are equal."""
        return self._call(self._reproduce(run_id, step))

    async def _reproduce(self, run_id: str, step: int) -> ReproductionView:
        view = await self._client.reproduce(run_id, step)
        while view.state is ReproductionState.RUNNING:
            await asyncio.sleep(POLL_S)
            view = await self._client.reproduction(run_id)
        return view

    def events(self, run_id: str, *, kinds: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield events (name, body) until the end."""
        stream = self._client.events(run_id, kinds=kinds)
        while True:
            try:
                message = self._call(anext(stream))  # pyright: ignore[reportArgumentType]
            except StopAsyncIteration:
                return
            yield message.event, json.loads(message.data)

    def _to_document(self, config: RunConfig | str | Path, overrides: Sequence[str]) -> str:
        if not isinstance(config, RunConfig):
            return compose_document(Path(config), overrides, is_remote=is_remote(self.url))
        if overrides:
            raise ValueError("overrides are applied by load_config: create(load_config(path, overrides))")
        return json.dumps(to_saved_tree(config))

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
