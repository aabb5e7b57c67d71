"""What the learner and the replicas ask of the weight-sync broker."""

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from offbeat.services.messages.types import Manifest
from offbeat.services.weights.replica_reports import ReplicaLoad

if TYPE_CHECKING:
    from torch import Tensor


IDLE = ReplicaLoad()


class WeightPublisher(Protocol):
    """The broker as the learner sees it."""

    def publish(self, version: int, step: int, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Copy the tensors out and announce them as `version`; returns as soon as the tensors may change again.

        A version that is not newer than the newest one is left alone: a learner that replays steps after a crash makes
        the same weights again. It is announced all the same if neither its bytes nor newer ones can be read any more.

        Raises:
            FencedError: a newer learner holds the run (seen by this announcement or by the one before).
            WeightsError: the announcement before this one failed.
        """
        ...

    def newest(self) -> Manifest | None:
        """The newest announced version whose bytes can still be read."""
        ...

    def close(self) -> None:
        """Wait for what is being announced, then let go. Raises as `publish`."""
        ...


class WeightSubscriber(Protocol):
    """The broker as a replica sees it; every call raises `RetryableError` while Redis does not answer, or refuses writes."""

    async def newest(self) -> Manifest | None:
        """The newest announced version whose bytes can be read, or None before the first. One whose read hangs is passed
        over.

        Raises:
            WeightsError: looking for its bytes took longer than `weights.fetch_timeout_s`.
        """
        ...

    async def wait_newer(self, version: int, timeout_s: float) -> Manifest | None:
        """The newest version once it is newer than `version`, or None when the time is over. Raises as `newest`."""
        ...

    def fetch(self, manifest: Manifest) -> AbstractAsyncContextManager[Path]:
        """A local safetensors file with the version's bytes, its digest checked; it stays until the context ends, even if
        the version is collected meanwhile. For an adapter, a folder as PEFT writes it (see `AdapterTransport.fetch`).

        Raises:
            WeightsError: the bytes are gone or damaged, or could not be read within `weights.fetch_timeout_s`.
        """
        ...

    async def report(self, replica_id: str, version: int, load: ReplicaLoad = IDLE) -> None:
        """Say which version a replica serves now (-1: none yet), and what it has in hand; repeated, as a sign of life."""
        ...

    async def retire(self, replica_id: str) -> None:
        """Forget a replica that stops."""
        ...
