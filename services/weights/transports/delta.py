"""Delta versions: elements that differ from the last complete version (anchor).

RL changes few bits of bfloat16 weights per step. A replica keeps the anchor and reads one delta. Invariants: it loads
exactly the complete version's bytes, verified by digests of delta, anchor and result, or nothing.
"""

# pyright: basic
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgpack
import numpy as np
import numpy.typing as npt
from msgspec import structs

from offbeat.services.errors import WeightsError
from offbeat.services.messages.types import BaseVersion, Manifest
from offbeat.services.weights.transports.base import (
    DIFFERENCE,
    WHOLE,
    FileTransport,
    Stored,
    StoredFile,
    algorithm_of,
    new_hash,
    write_bytes,
)

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
MAX_DELTA_SHARE = 0.5
"""Share of changed bytes above which a version becomes the anchor."""
MAX_GAP = (1 << 32) - 1
"""Elements between two positions in a packed difference."""
ZSTD_LEVEL = 1
"""Higher levels are several times slower and save a few percent."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Difference:
    width: int
    """Bytes of an element."""
    num_bytes: int
    positions: npt.NDArray[np.int64]
    """Positions in elements, ascending."""
    flips: npt.NDArray[Any]
    """Old bits xor new bits."""


def compute_difference(old: Bytes, new: Bytes, width: int) -> Difference:
    """Return the difference between files of equal layout.

    Raises:
        ValueError: unequal lengths, or not multiples of the width.
    """
    if len(old) != len(new) or len(old) % width:
        raise ValueError(f"{len(old)} and {len(new)} bytes are no two versions of elements of {width} bytes")
    before, after = (part.view(f"<u{width}") for part in (old, new))
    positions = np.flatnonzero(before != after)
    return Difference(width, len(old), positions, before[positions] ^ after[positions])


def apply_difference(old: Bytes, change: Difference) -> Bytes:
    """Return a changed copy of `old`.

    Raises:
        ValueError: the difference is another file's.
    """
    if len(old) != change.num_bytes:
        raise ValueError(f"a difference of {change.num_bytes} bytes does not fit {len(old)}")
    new = old.copy()
    elements = new.view(f"<u{change.width}")
    if len(change.positions) and int(change.positions[-1]) >= len(elements):
        raise ValueError("a changed element is past the end")
    elements[change.positions] ^= change.flips
    return new


def pack(change: Difference, result_digest: str) -> bytes:
    """Compress gaps between positions and flipped bits, by byte plane."""
    change = _fill_gaps(change)
    gaps = np.diff(change.positions, prepend=-1).astype("<u4")
    body = [FORMAT, change.width, change.num_bytes, len(gaps), _compress(gaps), _compress(change.flips), result_digest]
    return cast(bytes, msgpack.packb(body))


def unpack(blob: bytes) -> tuple[Difference, str]:
    """Decode a packed difference and the result's digest.

    Raises:
        ValueError: it is malformed, or of another build.
    """
    try:
        form, width, num_bytes, count, gaps, flips, digest = msgpack.unpackb(blob)
    except (TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"no difference of weights: {error}") from error
    if form != FORMAT or width not in (2, 4) or not 0 <= count <= num_bytes:
        raise ValueError(f"a difference of format {form}, elements of {width} bytes, {count} of them")
    positions = np.cumsum(_decompress(gaps, count, 4).astype(np.int64)) - 1
    return Difference(width, num_bytes, positions, _decompress(flips, count, width)), str(digest)


def digest_of_bytes(content: Bytes, algorithm: str = "blake3") -> str:
    """Return the digest as `digest_of` does for a file."""
    digest = new_hash(algorithm)
    digest.update(content.data)
    return f"{algorithm}:{digest.hexdigest()}"


def _fill_gaps(change: Difference) -> Difference:
    """Return a difference with positions that change nothing where others are further apart than `MAX_GAP`."""
    gaps = np.diff(change.positions, prepend=-1)
    wide = np.flatnonzero(gaps > MAX_GAP)
    if not len(wide):
        return change
    ends = change.positions[wide]
    fillers = [np.arange(end - gap + MAX_GAP, end, MAX_GAP) for end, gap in zip(ends, gaps[wide], strict=True)]
    places = np.repeat(wide, [len(each) for each in fillers])
    positions = np.insert(change.positions, places, np.concatenate(fillers))
    return replace(change, positions=positions, flips=np.insert(change.flips, places, 0))


def _compress(elements: npt.NDArray[Any]) -> bytes:
    planes = np.ascontiguousarray(elements.view(np.uint8).reshape(len(elements), elements.itemsize).T)
    return _codec().compress(planes.tobytes(), asbytes=True)


def _decompress(blob: bytes, count: int, width: int) -> npt.NDArray[Any]:
    planes = np.frombuffer(_codec().decompress(blob, count * width, asbytes=True), dtype=np.uint8)
    if len(planes) != count * width:
        raise ValueError(f"{len(planes)} bytes for {count} elements of {width}")
    return np.ascontiguousarray(planes.reshape(width, count).T).reshape(-1).view(f"<u{width}")


def _codec() -> Any:
    import pyarrow

    return pyarrow.Codec("zstd", compression_level=ZSTD_LEVEL)


@dataclass(slots=True)
class _Base:
    anchor: BaseVersion
    content: Bytes
    since: int = 0
    """Versions stored against it."""


class DeltaTransport:
    """`Transport` of complete versions and differences in another one."""

    def __init__(self, inner: FileTransport, anchor_every: int) -> None:
        self.name = inner.name
        self._inner = inner
        self._anchor_every = anchor_every
        self._base: _Base | None = None
        self._cached: tuple[BaseVersion, Bytes] | None = None

    def copies(self, tensors: "Iterable[tuple[str, Tensor]]") -> "dict[str, Tensor]":
        return self._inner.copies(tensors)

    def stage(self, version: int, epoch: int, tensors: "dict[str, Tensor]") -> Stored:
        """Store a complete version or a delta."""
        from safetensors.torch import save

        content = np.frombuffer(save(tensors), dtype=np.uint8)
        width = min(tensor.element_size() for tensor in tensors.values())
        packed = self._packed(content, width)
        if packed is None or self._base is None:
            return self._stage_whole(version, epoch, content)
        stored = self._inner.store(version, epoch, DIFFERENCE, lambda path: write_bytes(path, packed))
        self._base.since += 1
        return replace(stored, anchor=self._base.anchor)

    def _packed(self, content: Bytes, width: int) -> bytes | None:
        """Return the difference to store; None for a complete version."""
        base = self._base
        if (
            base is None
            or base.since + 1 >= self._anchor_every
            or len(base.content) != len(content)
            or width not in (2, 4)
        ):
            return None
        packed = pack(compute_difference(base.content, content, width), digest_of_bytes(content))
        return packed if len(packed) <= MAX_DELTA_SHARE * len(content) else None

    def _stage_whole(self, version: int, epoch: int, content: Bytes) -> Stored:
        stored = self._inner.store(version, epoch, WHOLE, lambda path: write_bytes(path, content.data))
        anchor = BaseVersion(stored.location, stored.digest, stored.num_bytes)
        self._base = _Base(anchor, content)
        return stored

    @contextmanager
    def fetch(self, manifest: Manifest) -> Iterator[Path]:
        if manifest.anchor is None:
            with self._inner.fetch(manifest) as path:
                yield path
            return
        with self._inner.fetch(manifest) as path:
            blob = path.read_bytes()
        content = self._put_together(manifest, blob)
        with ExitStack() as stack:
            descriptor = os.memfd_create("offbeat-weights")
            stack.callback(os.close, descriptor)
            _write_all(descriptor, content)
            yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")

    def _put_together(self, manifest: Manifest, blob: bytes) -> Bytes:
        assert manifest.anchor is not None
        try:
            change, wanted = unpack(blob)
            content = apply_difference(self._anchor(manifest, manifest.anchor), change)
        except ValueError as error:
            raise WeightsError(f"version {manifest.version} is damaged: {error}") from error
        if (found := digest_of_bytes(content, algorithm_of(wanted))) != wanted:
            raise WeightsError(f"version {manifest.version} is damaged: put together it is {found}, not {wanted}")
        return content

    def _anchor(self, manifest: Manifest, anchor: BaseVersion) -> Bytes:
        """Return the anchor's content, cached for the newest."""
        if self._cached is None or self._cached[0] != anchor:
            with self._inner.fetch(_anchor_manifest(manifest, anchor)) as path:
                self._cached = (anchor, np.fromfile(path, dtype=np.uint8))
        return self._cached[1]

    def readable(self, manifest: Manifest) -> bool:
        anchor = manifest.anchor
        there = anchor is None or self._inner.readable(_anchor_manifest(manifest, anchor))
        return there and self._inner.readable(manifest)

    def delete(self, location: str) -> None:
        self._inner.delete(location)

    def stored(self) -> list[StoredFile]:
        return self._inner.stored()

    def close(self) -> None:
        self._inner.close()


def _anchor_manifest(manifest: Manifest, anchor: BaseVersion) -> Manifest:
    return structs.replace(
        manifest, location=anchor.location, digest=anchor.digest, num_bytes=anchor.num_bytes, anchor=None
    )


def _write_all(descriptor: int, content: Bytes) -> None:
    left = content.data
    while left:
        left = left[os.write(descriptor, left) :]
