"""Handles of a learner's GPU memory."""

import json
from typing import Any, cast

import pytest
import torch

from offbeat.services.errors import WeightsError
from offbeat.services.generation.vllm.gpu_transfer import _rebuild_arguments
from offbeat.services.weights.transports.gpu_pulls import PullServer, TensorPull
from offbeat.services.weights.transports.vllm_senders import HeldSource, PullServerClient, _plain

pytestmark = pytest.mark.slow


def test_the_handle_of_device_memory_survives_json() -> None:
    arguments = (
        torch.Tensor,
        torch.Size([8]),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        3,
        b"\x00handle",
        8,
        512,
    )
    arguments += (False, b"\xffcounter", 16, b"event\x80", True)
    update = {
        "names": ["w"],
        "dtype_names": ["float32"],
        "shapes": [[2]],
        "tensor_sizes": [8],
        "ipc_handles": {"GPU-1": arguments},
    }
    plain = json.loads(json.dumps(_plain(update)))
    assert _rebuild_arguments(plain["handles"]["GPU-1"]) == arguments
    assert plain["tensor_sizes"] == [8]


def test_a_broadcast_to_a_replica_that_is_gone_is_aborted() -> None:
    """The learner's kernel would wait for it, and every later synchronization of the device for the kernel."""

    class FakeServer:
        def wait_done(self, pull: TensorPull) -> None:
            if pull.pull_id == "gone":
                raise WeightsError("a replica did not load version 1")

    def client(name: str) -> PullServerClient:
        server = cast(PullServer, FakeServer())
        made = PullServerClient(TensorPull(name, 1, 1, 0.0), server, HeldSource({}), rendezvous=True)
        made.abort = lambda: aborted.append(name)
        return made

    aborted: list[str] = []
    client("loaded").update_weights(cast(Any, {}))
    with pytest.raises(WeightsError):
        client("gone").update_weights(cast(Any, {}))
    assert aborted == ["gone"]
