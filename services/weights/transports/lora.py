"""Adapter versions: low-rank tensors on a base that is published once.

A manifest names the base as its anchor, which replicas keep. Invariants: a replica gets an adapter and the base that it
was trained on, digests verified.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from offbeat.services.errors import StoreUnavailableError, WeightsError
from offbeat.services.generation.adapter_settings import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX
from offbeat.services.messages.types import BaseVersion, Manifest
from offbeat.services.weights.transports.base import (
    ADAPTER,
    AdapterSettings,
    FileTransport,
    Stored,
    StoredFile,
    write_safetensors,
)

if TYPE_CHECKING:
    from torch import Tensor

FILES = (ADAPTER_WEIGHTS, "model.safetensors")
"""Of an adapter and its base."""
BASE_DIGEST = "base_digest.txt"
"""Digest of the base's file, delivered with each adapter."""


class AdapterTransport:
    """`Transport` of bases and adapters in another one."""

    def __init__(self, inner: FileTransport, settings: AdapterSettings) -> None:
        """settings: of the published adapter; empty on the fetching side."""
        self.name = inner.name
        self._inner = inner
        self._settings = settings
        self._base: BaseVersion | None = None
        self._held = ""

    def copies(self, tensors: "Iterable[tuple[str, Tensor]]") -> "dict[str, Tensor]":
        """Return copies, without a stored base."""
        there = self.is_base_stored()
        return self._inner.copies((name, each) for name, each in tensors if not there or name.startswith(PREFIX))

    def is_base_stored(self) -> bool:
        """Return whether the base is stored; an unavailable store counts as having kept it."""
        if self._base is None:
            return False
        try:
            return self._base.location in {file.location for file in self._inner.stored()}
        except StoreUnavailableError:
            return True

    def stage(self, version: int, epoch: int, tensors: "dict[str, Tensor]") -> Stored:
        adapter = {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
        if len(adapter) < len(tensors):
            base = {name: tensor for name, tensor in tensors.items() if name not in adapter}
            stored = self._inner.stage(version, epoch, base)
            self._base = BaseVersion(stored.location, stored.digest, stored.num_bytes)
        if self._base is None or not adapter:
            raise WeightsError(f"version {version} has no adapter, or no base: publish both")
        settings = {ADAPTER_CONFIG: json.dumps(self._settings)}
        stored = self._inner.store(version, epoch, ADAPTER, lambda path: write_safetensors(path, adapter, settings))
        return replace(stored, anchor=self._base)

    @contextmanager
    def fetch(self, manifest: Manifest) -> Iterator[Path]:
        """Yield a PEFT folder, with the base unless delivered before."""
        base = manifest.anchor
        if base is None:
            raise WeightsError(f"version {manifest.version} is no adapter: its learner publishes merged weights")
        with ExitStack() as stack:
            found = [stack.enter_context(self._inner.fetch(structs.replace(manifest, anchor=None)))]
            if base.digest != self._held:
                found.append(stack.enter_context(self._inner.fetch(_base_manifest(manifest, base))))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="offbeat-adapter-")))
            for path, name in zip(found, FILES, strict=False):
                (folder / name).symlink_to(path)
            (folder / ADAPTER_CONFIG).write_text(_settings_of(found[0]))
            (folder / BASE_DIGEST).write_text(base.digest)
            yield folder
        self._held = base.digest

    def readable(self, manifest: Manifest) -> bool:
        base = manifest.anchor
        return base is not None and all(self._inner.readable(m) for m in (manifest, _base_manifest(manifest, base)))

    def delete(self, location: str) -> None:
        self._inner.delete(location)

    def stored(self) -> list[StoredFile]:
        return self._inner.stored()

    def close(self) -> None:
        self._inner.close()


def base_digest(path: Path) -> str:
    """Return the digest of a delivered adapter's base; empty for whole weights."""
    return (path / BASE_DIGEST).read_text() if path.is_dir() else ""


def _base_manifest(manifest: Manifest, base: BaseVersion) -> Manifest:
    return structs.replace(manifest, location=base.location, digest=base.digest, num_bytes=base.num_bytes, anchor=None)


def _settings_of(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return file.metadata()[ADAPTER_CONFIG]
