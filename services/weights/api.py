"""Interface of the weight-sync broker to the learner and the replicas."""

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
        """Copy the tensors and announce them as `version`; the tensors may change again after this returns.

        A version that is not newer than the newest one is ignored: a learner that repeats steps after a crash produces
        the same weights. It is announced again if neither its bytes nor newer ones are readable any more.

        Raises:
            FencedError: a newer learner holds the run (detected by this announcement or the previous one).
            WeightsError: the previous announcement failed.
        """
        ...

    def newest(self) -> Manifest | None:
        """Return the newest announced version whose bytes can still be read."""
        ...

    def close(self) -> None:
        """Wait for the announcement in progress, then release resources. Raises as `publish`."""
        ...


class WeightSubscriber(Protocol):
    """The broker as a replica sees it; every call raises `RetryableError` while Redis does not answer, or refuses writes."""

    async def newest(self) -> Manifest | None:
        """Return the newest announced version whose bytes can be read, or None before the first. One whose read hangs
        is passed over.

        Raises:
            WeightsError: looking for its bytes took longer than `weights.fetch_timeout_s`.
        """
        ...

    async def wait_newer(self, version: int, timeout_s: float) -> Manifest | None:
        """Return the newest version once it is newer than `version`, or None when the time is over. Raises as `newest`."""
        ...

    def fetch(self, manifest: Manifest) -> AbstractAsyncContextManager[Path]:
        """Return a local safetensors file with the version's bytes, its digest checked; it stays until the context
        ends, even if the version is collected meanwhile. For an adapter, a folder as PEFT writes it (see
        `AdapterTransport.fetch`).

        Raises:
            WeightsError: the bytes are gone or damaged, or could not be read within `weights.fetch_timeout_s`.
        """
        ...

    async def report(self, replica_id: str, version: int, load: ReplicaLoad = IDLE) -> None:
        """Report the version that a replica serves (-1: none yet) and its load; repeated as a heartbeat."""
        ...

    async def retire(self, replica_id: str) -> None:
        """Forget a replica that stops."""
        ...
