"""Devices of roles without one."""

import os
import re
from importlib.metadata import PackageNotFoundError, distribution
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

from offbeat.deploy.config.run import RunConfig
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.gpu_memory import WSL_GPU
from offbeat.trainer.config.actor_train import ActorTrainConfig
from offbeat.trainer.config.roles import CriticConfig, ReferenceConfig, TeacherConfig
from offbeat.trainer.config.scored_roles import scored_roles

Role = TypeVar("Role", ActorTrainConfig, CriticConfig, ReferenceConfig, TeacherConfig)

GPU_ENGINES = {"vllm": "vllm", "sglang": "sglang"}
"""Strategy of engines on GPUs -> its distribution for CUDA."""
FLASH = "flash-attn"
"""Distribution of `flash_attention_2`."""
DEVICE_FILES = Path("/dev")
UUID = re.compile(r"(GPU|MIG)-.+")
"""In CUDA_VISIBLE_DEVICES, in place of a number."""


def choose_devices(config: RunConfig, gpus: float) -> RunConfig:
    """Return the run with devices: roles without `device` take GPUs if there are enough for each; engines and learner
    may share them. Settings of GPUs are removed on CPUs.

    gpus: of the machine or cluster, those of rewards included. Without CUDA's vLLM, or SGLang for `sglang` (here, or
    in a Python of its own), all stay on CPUs.
    """
    infer, train = config.actor_infer, config.actor_train
    free = gpus - sum(reward.num_replicas * reward.gpus_per_replica for reward in config.rewards)
    own = sum(role.num_replicas for role in scored_roles(config, config.reference)) + config.num_critic_processes
    if "device" in train.model_fields_set and train.device == "cuda":
        free -= own
        own = 0
    engine = infer.strategy_args.strategy_name
    has_engine = bool(infer.strategy_args.python) or is_installed(GPU_ENGINES.get(engine, "vllm"))
    has_gpus = free >= 1 and has_engine
    suffice = has_gpus and infer.num_replicas * infer.engine.world_size <= free
    if "device" not in infer.model_fields_set and suffice and engine in GPU_ENGINES:
        infer = infer.model_copy(update={"device": "cuda"})
    engines = infer.num_replicas * infer.engine.world_size if infer.device == "cuda" else 0
    suffice = has_gpus and max(engines, train.num_processes) + own <= free
    if "device" not in train.model_fields_set and suffice:
        train = train.model_copy(update={"device": "cuda"})
    config = config.model_copy(update={"actor_infer": _without_utilization(infer), "actor_train": train})
    return config if train.device == "cuda" and is_installed(FLASH) else _without_flash(config)


def _without_utilization(infer: GenerationConfig) -> GenerationConfig:
    if infer.device == "cuda" or "device" in infer.model_fields_set:
        return infer
    return infer.with_engine(gpu_memory_utilization=None)


def _without_flash(config: RunConfig) -> RunConfig:
    """Replace `flash_attention_2` by `auto`, which uses PyTorch's."""
    roles = {name: _with_auto(getattr(config, name)) for name in ("actor_train", "critic", "reference")}
    teachers = {name: _with_auto(teacher) for name, teacher in config.teacher.items()}
    return config.model_copy(update={**roles, "teacher": teachers})


def _with_auto(role: Role) -> Role:
    if role.model_args.attn_implementation != "flash_attention_2":
        return role
    args = role.model_args.model_copy(update={"attn_implementation": "auto"})
    return role.model_copy(update={"model_args": args})


def count_gpus() -> int:
    """Count this machine's usable NVIDIA GPUs."""
    found = len(list(DEVICE_FILES.glob("nvidia[0-9]*"))) or int(WSL_GPU.exists())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    # As CUDA, which ignores a name that is none, as -1, and all after it, and takes none of names with a repeated one
    names = list(takewhile(lambda name: _is_device(name, found), map(str.strip, visible.split(","))))
    return min(found, len(names)) if len(set(names)) == len(names) else 0


def _is_device(name: str, found: int) -> bool:
    return bool(UUID.fullmatch(name)) or (name.isdecimal() and int(name) < found)


def is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
