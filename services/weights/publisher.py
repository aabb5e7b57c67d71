"""Learner side of the broker: copies weights, then stores and announces them in the background.

Invariants: versions are announced in order, one at a time; the next call raises an announcement's error;
`progress.version` never decreases, unless acknowledged checkpoints are given up (the buffer's reconcile.lua); the base of
a delta or adapter is kept while a kept version names it. An existing version is ignored, unless its bytes and all newer
ones are gone: then it is announced again, and admission continues from its step (`progress.step`). An announcement that
meets another incarnation is dropped; the learner publishes again after reconciling.
"""

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from redis import Redis

from offbeat.services.errors import (
    FencedError,
    ForeignRunError,
    ReconcileError,
    StoreUnavailableError,
    WeightsError,
)
from offbeat.services.keys import RunKeys
from offbeat.services.messages.codec import decode_manifest, encode_manifest
from offbeat.services.messages.types import Manifest, TensorSpec
from offbeat.services.redis.incarnation import KnownIncarnation, uid_of
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.transports.base import AdapterSettings, Stored, Transport
from offbeat.services.weights.transports.counting import CountingTransport
from offbeat.services.weights.transports.device import DeviceTransport
from offbeat.services.weights.transports.factory import make_transport
from offbeat.services.weights.transports.lora import AdapterTransport

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

RETRY_INTERVAL_S = 1.0
PUBLISH = files("offbeat.services.weights").joinpath("publish.lua").read_text(encoding="utf-8")


class RedisWeightPublisher:
    def __init__(
        self,
        redis: Redis,
        run_id: str,
        config: WeightsConfig,
        epoch: int,
        output_dir: Path,
        adapter: AdapterSettings | None = None,
        known: KnownIncarnation | None = None,
        *,
        has_replicas: bool = True,
        should_retry: Callable[[Exception], bool] = lambda _: False,
    ) -> None:
        """adapter: the published adapter; None for merged weights. has_replicas: False only counts versions.
        should_retry: called after each failure of the store; False raises it.
        """
        self._known = known or KnownIncarnation(redis, run_id)
        self._redis = redis
        self._run_id = run_id
        self._keys = RunKeys(run_id)
        self._keep_versions = config.keep_versions
        self._epoch = epoch
        self._transport: Transport = (
            make_transport(config, run_id, output_dir, redis=redis, adapter=adapter)
            if has_replicas
            else CountingTransport()
        )
        self._should_retry = should_retry
        self._script = redis.register_script(PUBLISH)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._announcing: Future[None] | None = None

    def publish(self, version: int, step: int, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        self.flush()
        gone = self._lost_versions(version)
        if gone is None:
            return
        copies = self._transport.copies(tensors)
        self._announcing = self._thread.submit(self._store_and_announce, version, step, copies, gone)

    def needs_base(self) -> bool:
        self.flush()
        return not (isinstance(self._transport, AdapterTransport) and self._transport.is_base_stored())

    def newest(self) -> Manifest | None:
        readable = [manifest for manifest in self._manifests().values() if self._transport.readable(manifest)]
        return max(readable, key=lambda manifest: manifest.version, default=None)

    def flush(self) -> bool:
        announcing, self._announcing = self._announcing, None
        if announcing is not None:
            announcing.result()
        return announcing is not None

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._thread.shutdown()
            self._transport.close()

    def _lost_versions(self, version: int) -> list[int] | None:
        """Return versions without bytes if `version` is to be announced; None if it exists."""
        newest = cast(bytes | None, self._redis.hget(self._keys.progress, "version"))
        if newest is None or version > int(newest):
            return []
        manifests = self._manifests()
        gone = [v for v, manifest in manifests.items() if not self._transport.readable(manifest)]
        return None if any(v >= version for v in manifests.keys() - set(gone)) else gone

    def _manifests(self) -> dict[int, Manifest]:
        blobs = cast(dict[bytes, bytes], self._redis.hgetall(self._keys.manifests))
        return {int(version): decode_manifest(blob) for version, blob in blobs.items()}

    def _store_and_announce(self, version: int, step: int, tensors: "dict[str, Tensor]", gone: list[int]) -> None:
        stored = self._stage(version, tensors)
        manifest = self._manifest(version, step, tensors, stored)
        try:
            fallen_out = self._announce(manifest, gone)
        except FencedError:
            self._delete(stored.location)
            raise  # after any other error it may have been announced: the broker collects the bytes if it was not
        except ReconcileError as error:
            logger.warning("version %d is not announced: %s", version, error)
            return
        self._delete_unnamed(fallen_out)

    def _delete_unnamed(self, fallen_out: list[Manifest]) -> None:
        """Delete versions that are not kept, and their bases, unless a kept one names them."""
        transport = self._transport
        # What Redis forgot: the broker collects files, but not memory
        held = transport.held if isinstance(transport, DeviceTransport) else frozenset[str]()
        if unneeded := _locations(fallen_out) | held:
            for location in sorted(unneeded - _locations(self._manifests().values())):
                self._delete(location)

    def _delete(self, location: str) -> None:
        try:
            self._transport.delete(location)
        except (StoreUnavailableError, WeightsError) as error:  # as of the folder that this one was copied from
            logger.info("left: %s", error)

    def _stage(self, version: int, tensors: "dict[str, Tensor]") -> Stored:
        while True:
            try:
                return self._transport.stage(version, self._epoch, tensors)
            except StoreUnavailableError as error:
                if not self._should_retry(error):
                    raise
                time.sleep(RETRY_INTERVAL_S)

    def _manifest(self, version: int, step: int, tensors: "dict[str, Tensor]", stored: Stored) -> Manifest:
        specs = (
            TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in tensors.items()
        )
        return Manifest(
            run_id=self._run_id,
            version=version,
            step=step,
            epoch=self._epoch,
            transport=self._transport.name,
            location=stored.location,
            digest=stored.digest,
            num_bytes=stored.num_bytes,
            tensors=tuple(specs),
            published_at=time.time(),
            anchor=stored.anchor,
        )

    def _announce(self, manifest: Manifest, gone: list[int]) -> list[Manifest]:
        """Return the replaced manifests, or this one if the version existed."""
        names = ("epoch", "manifests", "progress", "doorbell", "versions", "incarnation")
        keys = [getattr(self._keys, name) for name in names]
        arguments = [
            self._epoch,
            manifest.version,
            manifest.step,
            encode_manifest(manifest),
            self._keep_versions,
            self._known.get(),
            *gone,
        ]
        status, *rest = cast(list[Any], self._script(keys=keys, args=arguments))
        match status:
            case b"announced":
                return [decode_manifest(blob) for blob in rest]
            case b"exists":
                return [manifest]
            case b"reconcile":
                current = rest[0].decode()
                if current and uid_of(current) != self._known.uid:
                    raise ForeignRunError("the run was created anew under this name")
                raise ReconcileError("the run's data in Redis has to be reconciled first")
            case b"fenced":
                raise FencedError(
                    f"version {manifest.version} of {self._run_id!r} is refused: this learner's epoch is {self._epoch}, "
                    f"the newest is {int(rest[0])}"
                )
            case _:
                raise WeightsError(f"publish.lua answered {status!r}")


def _locations(manifests: Iterable[Manifest]) -> set[str]:
    """Return the locations of versions and of their bases."""
    return {each.location for manifest in manifests for each in (manifest, manifest.anchor) if each is not None}
