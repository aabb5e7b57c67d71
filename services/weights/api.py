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
    def publish(self, version: int, step: int, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Copy the tensors, which may change afterwards, and announce them as `version`.

        Ignored unless newer, as a learner repeats steps after a crash. Announced again if neither its bytes nor newer
        ones can be read.

        Raises:
            FencedError: a newer learner holds the run (detected by this announcement or the previous one).
            WeightsError: the previous announcement failed.
        """
        ...

    def needs_base(self) -> bool:
        """Return whether `publish` needs the base of adapters, too, which is stored once. Raises as `publish`."""
        ...

    def newest(self) -> Manifest | None:
        """Return the newest readable version."""
        ...

    def flush(self) -> bool:
        """Wait for the announcement in progress; return False if there is none. Raises as `publish`."""
        ...

    def close(self) -> None:
        """Wait for the announcement in progress, then release resources; raises as `publish`."""
        ...


class WeightSubscriber(Protocol):
    """Replica side of the broker; calls raise `RetryableError` while Redis does not answer or refuses writes."""

    async def newest(self) -> Manifest | None:
        """Return the newest readable version, skipping reads that hang; None before the first.

        Raises:
            WeightsError: not found within `weights.fetch_timeout_s`.
        """
        ...

    async def wait_newer(self, version: int, timeout_s: float) -> Manifest | None:
        """Wait for a newer version; None after `timeout_s`. Raises as `newest`.

        Raises:
            RewoundError: the last fetched version is of a lineage that did not survive.
        """
        ...

    def fetch(self, manifest: Manifest) -> AbstractAsyncContextManager[Path]:
        """Yield a verified local safetensors file, or an adapter's PEFT folder.

        Raises:
            WeightsError: the bytes are gone, damaged, or not read within `weights.fetch_timeout_s`.
        """
        ...

    async def report(self, replica_id: str, version: int, load: ReplicaLoad = IDLE) -> None:
        """Report a replica's version (-1: none) and load; also the heartbeat."""
        ...

    async def retire(self, replica_id: str) -> None: ...
