from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.services.errors import WeightsError
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.transports.base import AdapterSettings, FileTransport, Transport, owner_of
from offbeat.services.weights.transports.delta import DeltaTransport
from offbeat.services.weights.transports.device import DeviceTransport
from offbeat.services.weights.transports.filesystem import FilesystemTransport
from offbeat.services.weights.transports.lora import AdapterTransport
from offbeat.services.weights.transports.shm import SharedMemoryTransport

if TYPE_CHECKING:
    from redis import Redis


def make_transport(
    config: WeightsConfig,
    run_id: str,
    output_dir: Path,
    *,
    redis: "Redis | None" = None,
    workers: int = 1,
    adapter: AdapterSettings | None = None,
) -> Transport:
    """Return the configured transport.

    redis: may block, for `ipc` and `nccl`. workers: GPUs of one replica. adapter: PEFT's settings of published
    adapters, empty on the fetching side; None for merged weights.

    Raises:
        WeightsError: the transport is unavailable on this host.
    """
    match config.transport:
        case "shm":
            shared = SharedMemoryTransport(owner_of(run_id, output_dir), dtype=config.dtype)
            return _wrap_transport(shared, config, adapter)
        case "fs":
            url = config.url or str(output_dir.resolve() / "weights")
            owner = owner_of(run_id, output_dir)
            return _wrap_transport(FilesystemTransport(owner, url, dtype=config.dtype), config, adapter)
        case "ipc" | "nccl":
            import torch

            if not torch.cuda.is_available():
                raise WeightsError(f"transport `{config.transport}` needs a GPU; use `weights.transport=shm` or `fs`")
            if redis is None:
                raise WeightsError(f"transport `{config.transport}` needs Redis")
            return DeviceTransport(config.transport, run_id, redis, dtype=config.dtype, workers=workers)


def _wrap_transport(transport: FileTransport, config: WeightsConfig, adapter: AdapterSettings | None) -> Transport:
    if adapter is not None:
        return AdapterTransport(transport, adapter)
    return DeltaTransport(transport, config.anchor_every) if config.anchor_every > 1 else transport


def leaves_files(config: WeightsConfig) -> bool:
    """Return whether versions outlive the learner."""
    return config.transport in ("shm", "fs")


def remove_all(transport: Transport) -> int:
    """Remove the run's files without Redis; return their number."""
    stored = transport.stored()
    for file in stored:
        transport.delete(file.location)
    return len(stored)


def cleanup(run_id: str, config: WeightsConfig, output_dir: Path) -> int:
    return remove_all(make_transport(config, run_id, output_dir)) if leaves_files(config) else 0
