"""Handles of a learner's GPU memory."""

import json

import pytest
import torch

from offbeat.services.generation.vllm.gpu_transfer import _rebuild_arguments
from offbeat.services.weights.transports.vllm_senders import _plain

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
