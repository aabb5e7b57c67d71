"""HTTP client of the control service."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx
from pydantic import ValidationError

from offbeat.services.control.console.schemas import (
    Axis,
    CompareView,
    GroupDetailView,
    GroupsView,
    ReproductionView,
    SeriesView,
    TrajectoryView,
)
from offbeat.services.control.event_schemas import MetricsView
from offbeat.services.control.run import RUN_ID, RunState
from offbeat.services.control.schemas import (
    DeletedView,
    ErrorBody,
    ErrorView,
    QuarantineView,
    RunsView,
    RunView,
    WhyView,
)
from offbeat.services.errors import ControlError, RetryableError


@dataclass(frozen=True, slots=True)
class StreamEvent:
    id: str
    event: str
    data: str


async def messages(
    lines: AsyncIterator[str], on_id: Callable[[str], None] = lambda _: None
) -> AsyncIterator[StreamEvent]:
    """Parse server-sent events, without an incomplete last one. on_id: called with each id, also without an event."""
    last_id, fields = "", dict[str, str]()
    async for line in lines:
        if line:
            name, _, value = line.partition(":")
            if name in ("id", "event", "data"):
                fields[name] = value.removeprefix(" ")
            continue
        if "id" in fields:
            last_id = fields["id"]
            on_id(last_id)
        if "data" in fields:
            yield StreamEvent(last_id, fields.get("event", "message"), fields["data"])
        fields = {}


JSON = {"Content-Type": "application/json"}
ACCEPT_JSON = {"Accept": "application/json"}
VALIDATION_TIMEOUT_S = 150.0
"""Exceeds the service's limit; a validation makes and resets envs."""
RECONNECT_INTERVAL_S = 1.0
MAX_EMPTY_STREAMS = 2
"""Of an ended run, in succession."""
TERMINAL = frozenset(state.value for state in RunState if state.is_terminal)
STREAM_TIMEOUT_S = 30.0
"""Keep-alives come every 15 s."""


class ControlRefusedError(ControlError):
    """4xx response; `error` is its body."""

    def __init__(self, status: int, error: ErrorView) -> None:
        self.status, self.error = status, error
        super().__init__(error.error.message)


def _run_path(run_id: str) -> str:
    """Return a run's path; raises `ControlRefusedError` for what is no id, and would be another path."""
    if re.fullmatch(RUN_ID, run_id) is None:
        message = f"there is no run {run_id!r}: a run's name has letters, digits, `_`, `.` and `-` alone"
        raise ControlRefusedError(404, ErrorView(error=ErrorBody(code="unknown_run", message=message, problems=[])))
    return f"/runs/{run_id}"


class ControlClient:
    """REST client; raises `ControlRefusedError` on a 4xx, `RetryableError` on an outage or a 5xx."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 10.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.url = url
        # No proxy settings from the environment: the service is reached directly.
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=timeout_s, transport=transport, trust_env=False
        )

    async def __aenter__(self) -> "ControlClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def create(self, config: str) -> RunView:
        return RunView.model_validate(await self._submit(config))

    async def validate(self, config: str) -> None:
        await self._submit(config, dry_run="true")

    async def _submit(self, config: str, **params: str) -> Any:
        timeout_s = VALIDATION_TIMEOUT_S
        return await self._call("POST", "/runs", content=config, headers=JSON, params=params, timeout=timeout_s)

    async def runs(
        self, *, states: Sequence[str] = (), name: str = "*", after: str | None = None, limit: int = 50
    ) -> RunsView:
        """Return runs, newest first; `name` is a glob."""
        place = (("after", after),) if after else ()
        params = (*(("state", state) for state in states), ("name", name), ("limit", str(limit)), *place)
        return RunsView.model_validate(await self._call("GET", "/runs", params=params))

    async def show(self, run_id: str) -> RunView:
        return RunView.model_validate(await self._call("GET", _run_path(run_id)))

    async def stop(self, run_id: str, *, now: bool = False) -> RunView:
        params = {"now": "true" if now else "false"}
        return RunView.model_validate(await self._call("POST", f"{_run_path(run_id)}/stop", params=params))

    async def pause(self, run_id: str) -> RunView:
        return RunView.model_validate(await self._call("POST", f"{_run_path(run_id)}/pause"))

    async def resume(self, run_id: str) -> RunView:
        return RunView.model_validate(await self._call("POST", f"{_run_path(run_id)}/resume"))

    async def change(self, run_id: str, values: Mapping[str, float]) -> RunView:
        return RunView.model_validate(await self._call("PATCH", _run_path(run_id), json=dict(values)))

    async def why(self, run_id: str) -> WhyView:
        return WhyView.model_validate(await self._call("GET", f"{_run_path(run_id)}/why"))

    async def quarantine(self, run_id: str) -> QuarantineView:
        return QuarantineView.model_validate(await self._call("GET", f"{_run_path(run_id)}/quarantine"))

    async def delete(self, run_id: str, *, files: bool = False) -> DeletedView:
        params = {"files": "true" if files else "false"}
        return DeletedView.model_validate(await self._call("DELETE", _run_path(run_id), params=params))

    async def metrics(self, run_id: str, after: str = "0", limit: int = 1000) -> MetricsView:
        params = {"after": after, "limit": str(limit)}
        return MetricsView.model_validate(await self._call("GET", f"{_run_path(run_id)}/metrics", params=params))

    async def groups(self, run_id: str, **filters: Any) -> GroupsView:
        """Return a page of groups; filters: parameters of the route."""
        params = {name: value for name, value in filters.items() if value is not None}
        return GroupsView.model_validate(await self._call("GET", f"{_run_path(run_id)}/groups", params=params))

    async def group(self, run_id: str, number: int) -> GroupDetailView:
        return GroupDetailView.model_validate(await self._call("GET", f"{_run_path(run_id)}/groups/{number}"))

    async def trajectory(self, run_id: str, group: int, index: int) -> TrajectoryView:
        path = f"{_run_path(run_id)}/trajectories/{group}/{index}"
        return TrajectoryView.model_validate(await self._call("GET", path, headers=ACCEPT_JSON))

    async def series(
        self,
        run_id: str,
        names: Sequence[str] = (),
        *,
        axis: Axis = "step",
        since: float | None = None,
        points: int = 1000,
    ) -> SeriesView:
        params = {"names": ",".join(names), "axis": axis, "points": str(points)}
        since_params = {} if since is None else {"since": repr(since)}
        return SeriesView.model_validate(
            await self._call("GET", f"{_run_path(run_id)}/series", params={**params, **since_params})
        )

    async def compare(self, run_ids: Sequence[str]) -> CompareView:
        return CompareView.model_validate(await self._call("GET", "/compare", params={"runs": ",".join(run_ids)}))

    async def fork(self, run_id: str, step: int, changes: Mapping[str, Any]) -> RunView:
        """Start a run from a checkpoint. changes: configuration keys, dotted or nested."""
        params, timeout_s = {"step": str(step)}, VALIDATION_TIMEOUT_S
        answer = await self._call(
            "POST", f"{_run_path(run_id)}/fork", params=params, json=dict(changes), timeout=timeout_s
        )
        return RunView.model_validate(answer)

    async def reproduce(self, run_id: str, step: int) -> ReproductionView:
        """Begin to repeat recorded steps."""
        params = {"step": str(step)}
        return ReproductionView.model_validate(
            await self._call("POST", f"{_run_path(run_id)}/reproduce", params=params)
        )

    async def reproduction(self, run_id: str) -> ReproductionView:
        return ReproductionView.model_validate(await self._call("GET", f"{_run_path(run_id)}/reproduce"))

    async def events(
        self,
        run_id: str,
        *,
        kinds: Sequence[str] = (),
        from_start: bool = False,
        patience_s: float = 60.0,
        parting_s: float = 10.0,
    ) -> AsyncIterator[StreamEvent]:
        """Yield events until the run is over, resuming streams that end before.

        patience_s: outage before `RetryableError`; parting_s: outage after which an ending run is over. An outage
        begins with the first failure and ends with an event or a keep-alive.
        """
        clock = asyncio.get_running_loop().time
        failed_at, last_id, ending, is_over, num_empty = math.inf, "", False, False, 0

        def note_id(event_id: str) -> None:
            nonlocal last_id
            last_id = event_id

        async def read_lines(response: httpx.Response) -> AsyncIterator[str]:
            nonlocal failed_at
            async for line in response.aiter_lines():
                if line.startswith((":", "data:")):
                    failed_at = math.inf
                yield line

        params = (*(("kind", kind) for kind in kinds), ("from_start", "true" if from_start else "false"))
        while True:
            headers = {"Last-Event-ID": last_id} if last_id else {}
            try:
                async with self._http.stream(
                    "GET", f"{_run_path(run_id)}/events", params=params, headers=headers, timeout=STREAM_TIMEOUT_S
                ) as response:
                    if response.status_code >= 400:
                        await response.aread()
                    _raise_for(response)
                    was_over, num_empty = is_over, num_empty + 1 if is_over else 0
                    async for message in messages(read_lines(response), note_id):
                        if message.event == "run":
                            state = json.loads(message.data)["state"]
                            is_over = state in TERMINAL
                            ending = is_over or state == RunState.DRAINING
                        else:
                            num_empty = 0
                        yield message
                # No 204 follows events that the server can't decode; it closes its streams without Redis, too
                if response.status_code == 204 or (is_over and num_empty >= MAX_EMPTY_STREAMS):
                    return
                if not is_over:
                    is_over = (await self.show(run_id)).state.is_terminal
                    ending = ending or is_over
                if was_over or not is_over:
                    await asyncio.sleep(RECONNECT_INTERVAL_S)
            except ControlRefusedError as error:
                if is_over and error.status == 404:  # deleted since
                    return
                raise
            except (httpx.TransportError, RetryableError) as error:
                failed_at = min(failed_at, clock())
                if ending and clock() > failed_at + parting_s:
                    return
                if clock() > failed_at + patience_s:
                    raise RetryableError(f"the control service can't be reached: {error!r}") from error
                await asyncio.sleep(RECONNECT_INTERVAL_S)

    async def _call(self, method: str, path: str, **kwargs: Any) -> Any:
        try:
            response = await self._http.request(method, path, **kwargs)
        except httpx.TransportError as error:
            raise RetryableError(f"the control service can't be reached: {error!r}") from error
        _raise_for(response)
        return response.json()


def _raise_for(response: httpx.Response) -> None:
    """Raise a failed response's error; its body was read."""
    if response.status_code < 400:
        return
    if response.status_code >= 500:
        raise RetryableError(f"the control service failed with {response.status_code}: {response.text[:200]}")
    try:
        body = ErrorView.model_validate_json(response.content)
    except ValidationError as error:
        seen = f"{response.status_code} {response.text[:80]}"
        raise RetryableError(f"not the control service, or it still starts (`serve status`): {seen}") from error
    raise ControlRefusedError(response.status_code, body)
