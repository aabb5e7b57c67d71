"""Weight versions in the learner's GPU memory (`ipc`, `nccl`), pulled through vLLM's transfer engines.

A version is readable while its learner serves pulls. Each pull opens its own connection.
"""

import importlib
import json
import logging
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from redis import Redis
from redis.exceptions import RedisError

from offbeat.services.errors import WeightsError
from offbeat.services.messages.types import Manifest
from offbeat.services.weights.transports.base import Stored, StoredFile, published_dtype
from offbeat.services.weights.transports.gpu_pulls import (
    PullServer,
    TensorPull,
    holder,
    open_pull,
)

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

HeldTensors = dict[str, "Tensor"]
Sender = Callable[[HeldTensors, TensorPull, PullServer], None]

SENDERS = "offbeat.services.weights.transports.vllm_senders"
"""Imported on the first staging, as it needs vLLM."""
TRANSFER_TIMEOUT_S = 300.0
PULL_POLL_S = 1.0
CLOSE_TIMEOUT_S = 20.0
"""Time for the serving thread to end."""


def checksum(tensors: "Iterable[tuple[str, Tensor]]") -> str:
    """Return `sum64:` and the sum of all bytes mod 2**64, computed on the tensors' device."""
    import torch

    total = 0
    for _, tensor in tensors:
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        total += int(content.sum(dtype=torch.int64).item())
    return f"sum64:{total % 2**64:016x}"


class DeviceTransport:
    def __init__(
        self,
        name: Literal["ipc", "nccl"],
        run_id: str,
        redis: Redis,
        *,
        dtype: str = "as_trained",
        workers: int = 1,
        sender: Sender | None = None,
    ) -> None:
        """workers: GPUs of one replica. sender: None uses vLLM's engine."""
        self.name = name
        self._run_id = run_id
        self._redis = redis
        self._dtype = dtype
        self._workers = workers
        self._sender = sender
        self._token = uuid.uuid4().hex
        self._desk = PullServer(redis, run_id, self._token)
        self._held: dict[str, HeldTensors] = {}
        self._serving: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def held(self) -> frozenset[str]:
        """Return the locations of the versions in memory."""
        return frozenset(self._held)

    def copies(self, tensors: "Iterable[tuple[str, Tensor]]") -> HeldTensors:
        return {name: tensor.detach().to(published_dtype(tensor, self._dtype), copy=True) for name, tensor in tensors}

    def stage(self, version: int, epoch: int, tensors: HeldTensors) -> Stored:
        location = f"{self._token}/v{version}-e{epoch}"
        self._held[location] = tensors
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        stored = Stored(location, checksum(tensors.items()), num_bytes)
        if self._serving is None:
            sender = self._sender or getattr(importlib.import_module(SENDERS), f"send_{self.name}")
            self._serving = threading.Thread(target=self._serve, args=(sender,), name="pull-server", daemon=True)
            self._serving.start()
        return stored

    def _serve(self, sender: Sender) -> None:
        while not self._closed.is_set():
            try:
                pull = self._desk.take(PULL_POLL_S)
                if pull is not None:
                    self._send(sender, pull)
            except (RedisError, WeightsError) as error:
                logger.warning("a replica was not served: %s", error)
                self._closed.wait(1.0)

    def _send(self, sender: Sender, pull: TensorPull) -> None:
        held = next((h for location, h in list(self._held.items()) if f"/v{pull.version}-" in location), None)
        if held is None:
            self._desk.answer(pull, {"error": "it is not held any more"})
            return
        try:
            sender(held, pull, self._desk)
        except (RuntimeError, ValueError, OSError) as error:
            self._desk.answer(pull, {"error": str(error)})
            raise WeightsError(f"sending version {pull.version} failed: {error}") from error

    @contextmanager
    def fetch(self, manifest: Manifest) -> Iterator[Path]:
        with (
            open_pull(
                self._redis, self._run_id, manifest.version, workers=self._workers, timeout_s=TRANSFER_TIMEOUT_S
            ) as ticket,
            tempfile.NamedTemporaryFile("w", prefix="offbeat-ticket-", suffix=".json") as file,
        ):
            ticket["update"]["digest"] = manifest.digest
            json.dump(ticket, file)
            file.flush()
            yield Path(file.name)

    def readable(self, manifest: Manifest) -> bool:
        return manifest.location.partition("/")[0] == holder(self._redis, self._run_id)

    def delete(self, location: str) -> None:
        self._held.pop(location, None)

    def stored(self) -> list[StoredFile]:
        """Return []: nothing outlives the learner."""
        return []

    def close(self) -> None:
        if self._serving is not None:
            self._closed.set()
            self._serving.join(timeout=CLOSE_TIMEOUT_S)
            self._desk.leave()
        self._held.clear()
