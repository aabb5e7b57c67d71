"""Interface of the generation service and its Ray Serve client."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from offbeat.services.awake_clock import AwakeClock
from offbeat.services.errors import GenerationError, MeshError, RetryableError
from offbeat.services.generation.resumption import ResumedCalls
from offbeat.services.messages.codec import decode_completions, encode_requests
from offbeat.services.messages.types import Completion, GenerateRequest

DEPLOYMENT = "generation"


class GenerationClient(Protocol):
    """Token ids in, token ids out."""

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[list[Completion]]:
        """Sample requests; yield each completion once, as they finish, with `error` if refused. An empty list means that
        requests go to another replica, or wait until one wakes.

        Raises:
            RetryableError: the replica died or left routing; resend the requests not yielded.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests, which then yield `error`; ignore unknown ids."""
        ...


class NoGeneration:
    """`GenerationClient` of a run that samples nothing."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[list[Completion]]:
        raise GenerationError(f"{len(requests)} turn(s) can't be sampled: the run has no engines")
        yield []  # pyright: ignore[reportUnreachable]

    async def abort(self, request_ids: Sequence[str]) -> None:
        del request_ids


class ServeGenerationClient:
    """`GenerationClient` over a Serve handle; a streaming call carries many turns to one replica.

    Calls wait for the deployment. Raises `RayServeException` if Serve is not running.
    """

    def __init__(self, app: str, clock: AwakeClock | None = None) -> None:
        """clock: stands still while requests wait because all replicas sleep."""
        self._handle = serve.get_deployment_handle(DEPLOYMENT, app)
        self._generate = self._handle.options(method_name="generate", stream=True)
        self._calls = ResumedCalls(self._call, clock or AwakeClock())

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[list[Completion]]:
        return self._calls.generate(requests)

    def _call(self, requests: Sequence[GenerateRequest], asleep: Sequence[str]) -> "_ServeCall":
        known = {"asleep": asleep} if asleep else {}
        return _ServeCall(self._generate.remote(encode_requests(requests), **known))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort on every replica."""
        self._calls.withdraw(request_ids)
        try:
            await self._handle.broadcast("abort", list(request_ids)).results_async()
        except (RayError, RayServeException) as error:
            raise _translate(error) from error


class _ServeCall:
    def __init__(self, call: Any) -> None:
        """call: Serve's streaming response."""
        self._call = call

    async def __aiter__(self) -> AsyncIterator[list[Completion]]:
        try:
            async for blob in self._call:
                yield decode_completions(blob)
        except (RayError, RayServeException) as error:
            raise _translate(error) from error

    def cancel(self) -> None:
        self._call.cancel()


def _translate(error: Exception) -> MeshError:
    """Convert Ray's wrapper to the service's error."""
    if not isinstance(error, RayTaskError):
        return RetryableError(f"no replica answered: {error}")
    cause = error.cause
    return cause if isinstance(cause, MeshError) else GenerationError(f"the replica failed: {cause!r}")
