"""vLLM's `ipc` and `nccl` transfer engines, with plain messages, checksum and completeness check."""

# pyright: basic
from base64 import b64decode
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_consumer, packed_nccl_broadcast_consumer

from offbeat.services.generation.checkpoint_names import engine_tensors
from offbeat.services.generation.vllm.loading import LoadError, finish_reload
from offbeat.services.weights.transports.device import checksum


class TensorIntake:
    def __init__(self, model: Any, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        self._expected = {name for name, _ in model.named_parameters()}
        self._loaded: set[str] = set()
        self._sum = 0

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors = list(tensors)
        self._sum += int(checksum(tensors).partition(":")[2], 16)
        self._loaded |= set(self._model.load_weights(engine_tensors(self._model_config.hf_config, tensors)))
        torch.cuda.current_stream().synchronize()  # another buffer's stream may complete a layer that began here

    def finish(self, digest: str) -> None:
        """Raise `LoadError` if a parameter is missing or the checksum differs."""
        found = f"sum64:{self._sum % 2**64:016x}"
        if found != digest:
            raise LoadError(f"the weights came damaged: {found}, {digest} announced")
        finish_reload(self._model, self._model_config, self._expected, self._loaded)


@dataclass
class PlainIpcUpdate(WeightTransferUpdateInfo):
    """vLLM's IPC update, sent by `services.weights.transports.vllm_senders`."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    tensor_sizes: list[int]
    handles: dict[str, dict[str, Any]]
    digest: str


class IpcEngine(IPCWeightTransferEngine):
    update_info_cls = PlainIpcUpdate

    def receive_weights(self, update_info: PlainIpcUpdate) -> None:
        """Load all or raise `LoadError`."""
        info, intake = update_info, TensorIntake(self.model, self.model_config)
        tensors = packed_ipc_consumer(
            ipc_handle={gpu: _rebuild_arguments(handle) for gpu, handle in info.handles.items()},
            names=info.names,
            shapes=info.shapes,
            dtype_names=info.dtype_names,
            tensor_sizes=info.tensor_sizes,
            device_index=self.device.index,
            importer=self._packed_importer,
        )
        intake.load(tensors)
        intake.finish(info.digest)

    def finish_weight_update(self) -> None:
        self._packed_importer.close()


def _rebuild_arguments(handle: dict[str, Any]) -> tuple[Any, ...]:
    return (
        torch.Tensor,
        torch.Size(handle["size"]),
        tuple(handle["stride"]),
        handle["offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        handle["device"],
        b64decode(handle["handle"]),
        handle["num_bytes"],
        handle["start"],
        False,
        b64decode(handle["counter"]),
        handle["counter_at"],
        b64decode(handle["event"]),
        handle["event_sync"],
    )


@dataclass
class CheckedNcclUpdate(NCCLWeightTransferUpdateInfo):
    digest: str = ""


class NcclEngine(NCCLWeightTransferEngine):
    update_info_cls = CheckedNcclUpdate

    def receive_weights(self, update_info: CheckedNcclUpdate) -> None:
        """Load all or raise `LoadError`."""
        info, intake = update_info, TensorIntake(self.model, self.model_config)
        if self.model_update_group is None:
            raise LoadError("the transfer was not initialised")
        specs = zip(info.names, info.shapes, info.dtype_names, strict=True)
        packed_nccl_broadcast_consumer(
            iterator=((name, (shape, getattr(torch, dtype))) for name, shape, dtype in specs),
            group=self.model_update_group,
            src=0,
            post_unpack_func=intake.load,
            buffer_size_bytes=self.packed_buffer_size_bytes,
            num_buffers=self.packed_num_buffers,
            device=self.device,
        )
        intake.finish(info.digest)

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` has finished."""
