"""Versions of a run without engines: announced for progress and admission, never copied."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.services.errors import WeightsError
from offbeat.services.messages.types import Manifest
from offbeat.services.weights.transports.base import Stored, StoredFile

if TYPE_CHECKING:
    from torch import Tensor


class CountingTransport:
    name = "none"

    def copies(self, tensors: "Iterable[tuple[str, Tensor]]") -> "dict[str, Tensor]":
        """Return nothing."""
        del tensors
        return {}

    def stage(self, version: int, epoch: int, tensors: "dict[str, Tensor]") -> Stored:
        del epoch, tensors
        return Stored(f"version {version}", "", 0)

    @contextmanager
    def fetch(self, manifest: Manifest) -> Iterator[Path]:
        raise WeightsError(f"version {manifest.version} was counted, not stored: the run has no engines")
        yield Path()  # pyright: ignore[reportUnreachable]

    def readable(self, manifest: Manifest) -> bool:
        del manifest
        return True

    def delete(self, location: str) -> None: ...

    def stored(self) -> list[StoredFile]:
        return []

    def close(self) -> None: ...
