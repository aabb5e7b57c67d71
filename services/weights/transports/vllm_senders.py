"""The learner's end of vLLM's `ipc` and `nccl` transfers (GPUs only).

vLLM's trainer engines drive inference through a client; here it passes on the parameters and waits, as replicas drive
themselves.
"""

# pyright: basic
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, WeightTransferUpdatePayload
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from offbeat.services.errors import WeightsError
from offbeat.services.process import free_port
from offbeat.services.weights.transports.gpu_pulls import PullServer, TensorPull


class HeldSource(WeightSource):
    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self._held = held

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._held.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._held.items()


class PullServerClient:
    """A `VLLMWeightSyncClient` for a replica that pulls."""

    def __init__(self, pull: TensorPull, server: PullServer, source: HeldSource, *, rendezvous: bool) -> None:
        self._pull = pull
        self._server = server
        self._source = source
        self._rendezvous = rendezvous
        self.abort: Callable[[], None] = lambda: None
        """End the learner's side of a transfer, called once the replica has failed or is gone."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Send the pull parameters before the trainer connects, as NCCL needs both ends."""
        self._init = init_info
        if self._rendezvous:
            meta = self._source.metadata()
            update = {
                "names": [m.name for m in meta],
                "dtype_names": [str(m.dtype).removeprefix("torch.") for m in meta],
                "shapes": [list(m.shape) for m in meta],
            }
            self._server.answer(self._pull, {"init": init_info, "update": update})

    def start_weight_update(self) -> None:
        """Do nothing; the replica starts by itself."""

    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None:
        """Send the pull parameters once; wait until the replica has loaded."""
        if not self._rendezvous:
            self._server.answer(self._pull, {"init": self._init, "update": _plain(cast(dict[str, Any], update_info))})
        try:
            self._server.wait_done(self._pull)
        except WeightsError:
            self.abort()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing; the replica finishes by itself."""


def _plain(update_info: dict[str, Any]) -> dict[str, Any]:
    """Return an IPC update as JSON, without what the replica knows of torch's `rebuild_cuda_tensor`."""
    handles = update_info["ipc_handles"]
    plain = {}
    for gpu, arguments in handles.items():
        _, size, stride, offset, _, _, device, handle, num_bytes, start, _, counter, counter_at, event, sync = arguments
        plain[gpu] = {
            "size": list(size),
            "stride": list(stride),
            "offset": offset,
            "device": device,
            "handle": b64encode(handle).decode(),
            "num_bytes": num_bytes,
            "start": start,
            "counter": b64encode(counter).decode(),
            "counter_at": counter_at,
            "event": b64encode(event).decode(),
            "event_sync": sync,
        }
    kept = ("names", "dtype_names", "shapes", "tensor_sizes")
    return {name: update_info[name] for name in kept} | {"handles": plain}


def send_ipc(held: dict[str, torch.Tensor], pull: TensorPull, server: PullServer) -> None:
    """Map the weights as one buffer into a replica on this GPU."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise WeightsError("transport `ipc` needs a learner of one process; use `nccl`")
    source = HeldSource(held)
    size = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=size)
    client = PullServerClient(pull, server, source, rendezvous=False)
    with torch.cuda.device(next(iter(held.values())).device):
        engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
        try:
            engine.send_weights()
        finally:
            engine.shutdown()


def send_nccl(held: dict[str, torch.Tensor], pull: TensorPull, server: PullServer) -> None:
    """Broadcast the weights to a replica; NCCL by itself would wait for ever for one that is gone."""
    source = HeldSource(held)
    port = free_port("")
    info = NCCLTrainerInitInfo(rank=0, master_address=server.address, master_port=port, world_size=1 + pull.workers)
    client = PullServerClient(pull, server, source, rendezvous=True)
    device = next(iter(held.values())).device

    def connect() -> NCCLTrainerWeightTransferEngine:
        with torch.cuda.device(device):
            return NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)

    engine = server.run_for(pull, connect)
    if engine.model_update_group is not None:
        client.abort = engine.model_update_group.destroy
    with torch.cuda.device(device):
        try:
            engine.send_weights()
        finally:
            engine.shutdown()
