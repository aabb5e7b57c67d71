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
        """Copy the tensors, which may change after this returns, and announce them as `version`.

        Ignored if `version` is not newer than the newest one: a learner that repeats steps after a crash produces the
        same weights. It is announced again if neither its bytes nor newer ones can be read.

        Raises:
            FencedError: a newer learner holds the run (detected by this announcement or the previous one).
            WeightsError: the previous announcement failed.
        """
        ...

    def newest(self) -> Manifest | None:
        """Return the newest announced version that can be read."""
        ...

    def close(self) -> None:
        """Wait for the announcement in progress, then release resources. Raises as `publish`."""
        ...


class WeightSubscriber(Protocol):
    """Replica side of the broker; calls raise `RetryableError` while Redis does not answer or refuses writes."""

    async def newest(self) -> Manifest | None:
        """Return the newest announced version that can be read, skipping reads that hang; None before the first.

        Raises:
            WeightsError: finding it took longer than `weights.fetch_timeout_s`.
        """
        ...

    async def wait_newer(self, version: int, timeout_s: float) -> Manifest | None:
        """Wait for a version newer than `version`; None after `timeout_s`. Raises as `newest`."""
        ...

    def fetch(self, manifest: Manifest) -> AbstractAsyncContextManager[Path]:
        """Return a verified local safetensors file, or an adapter's PEFT folder, that stays until the context ends.

        Raises:
            WeightsError: the bytes are gone, damaged, or not read within `weights.fetch_timeout_s`.
        """
        ...

    async def report(self, replica_id: str, version: int, load: ReplicaLoad = IDLE) -> None:
        """Report a replica's version (-1: none yet) and load; repeated as a heartbeat."""
        ...

    async def retire(self, replica_id: str) -> None:
        """Forget a replica that stops."""
        ...
