"""What the command line asks of the control service, over HTTP."""

from types import TracebackType
from typing import Any

import httpx
from pydantic import ValidationError

from services.control.views import ErrorView, MetricsView, RunsView, RunView
from services.errors import ControlError, RetryableError


class ControlRefusedError(ControlError):
    """The control service answered 4xx; `error` is its body."""

    def __init__(self, status: int, error: ErrorView) -> None:
        self.status, self.error = status, error
        super().__init__(error.error.message)


class ControlClient:
    """The REST API as methods.

    Every method raises `ControlRefusedError` on a 4xx and `RetryableError` when the service can't be reached or fails.
    """

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
        """Let go of the connections."""
        await self._http.aclose()

    async def create(self, config: str) -> RunView:
        """Start the run that `config` (JSON) describes."""
        headers = {"Content-Type": "application/json"}
        return RunView.model_validate(await self._call("POST", "/runs", content=config, headers=headers))

    async def runs(self) -> list[RunView]:
        """Every run, newest first."""
        return RunsView.model_validate(await self._call("GET", "/runs")).runs

    async def show(self, run_id: str) -> RunView:
        """One run."""
        return RunView.model_validate(await self._call("GET", f"/runs/{run_id}"))

    async def stop(self, run_id: str, *, now: bool = False) -> RunView:
        """End a run, gracefully or now."""
        params = {"now": "true" if now else "false"}
        return RunView.model_validate(await self._call("POST", f"/runs/{run_id}/stop", params=params))

    async def metrics(self, run_id: str, after: str = "0", limit: int = 1000) -> MetricsView:
        """Metric records that came after the id `after`."""
        params = {"after": after, "limit": str(limit)}
        return MetricsView.model_validate(await self._call("GET", f"/runs/{run_id}/metrics", params=params))

    async def _call(self, method: str, path: str, **kwargs: Any) -> Any:
        try:
            response = await self._http.request(method, path, **kwargs)
        except httpx.TransportError as error:
            raise RetryableError(f"the control service can't be reached: {error!r}") from error
        if response.status_code >= 500:
            raise RetryableError(f"the control service failed with {response.status_code}: {response.text[:200]}")
        if response.status_code >= 400:
            try:
                body = ErrorView.model_validate_json(response.content)
            except ValidationError as error:
                raise RetryableError(f"not the control service: {response.status_code} {response.text[:80]}") from error
            raise ControlRefusedError(response.status_code, body)
        return response.json()
