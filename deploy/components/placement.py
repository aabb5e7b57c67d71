# pyright: basic
"""Devices of a run on the Ray cluster."""

import ray

from offbeat.deploy.config.device_plan import ClusterNode, DevicePlan, plan_devices
from offbeat.deploy.config.run import RunConfig
from offbeat.services.errors import ControlError
from offbeat.services.generation.config import app_name


def list_nodes() -> list[ClusterNode]:
    return [
        ClusterNode(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"].get("GPU", 0)))
        for node in ray.nodes()
        if node["Alive"]
    ]


def place(config: RunConfig) -> DevicePlan:
    """Plan a run's devices; raises `ControlError` if they do not exist."""
    plan = plan_devices(config, list_nodes(), owns_engines=config.actor_infer.app in (None, app_name(config.exp_name)))
    if plan.issues:
        raise ControlError("; ".join(f"{issue.path}: {issue.message}" for issue in plan.issues))
    return plan
