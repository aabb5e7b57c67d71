"""Devices of Serve replicas on the nodes of a cluster."""

import logging
import os
from collections.abc import Sequence
from typing import Any

from ray import get_runtime_context

from offbeat.services.devices import VISIBLE, DeviceClaim, EngineDevices, parent_visible, visible_devices

logger = logging.getLogger(__name__)

NODE_LABEL = "ray.io/node-id"


def deployment_options(*, cpus: float, gpus: int, slots: Sequence[EngineDevices]) -> dict[str, Any]:
    """Return Serve's options. cpus, gpus: of a replica. slots: devices of the replicas; empty: Ray chooses."""
    options: dict[str, Any] = {"ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus}}
    if slots:
        # The placement group reserves GPUs of a node; the replica takes a slot there.
        nodes = ",".join(sorted({slot.node_id for slot in slots}))
        options["placement_group_bundles"] = [{"CPU": cpus, "GPU": gpus}]
        options["placement_group_bundle_label_selector"] = [{NODE_LABEL: f"in({nodes})"}]
    return options


def claim_devices(slots: Sequence[EngineDevices], role: str) -> DeviceClaim | None:
    """Take a free slot of this node, before CUDA starts; raises `NoDeviceError`."""
    if not slots:
        return None
    claim = DeviceClaim(slots, get_runtime_context().get_node_id(), role)
    os.environ[VISIBLE] = visible_devices(claim.slot.devices, parent_visible())
    logger.info("takes devices %s of this node", os.environ[VISIBLE])
    return claim
