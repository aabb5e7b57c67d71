"""Processors, memory, disks, limits and GPUs."""

import os
import platform
import re
import resource
import shutil
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import psutil

from offbeat.deploy.config.devices import count_gpus, is_installed
from offbeat.deploy.doctor.finding import InstallationFinding

X86 = ("x86_64", "AMD64")
CPU_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "bfloat16 (AVX-512)",
    "amx_bf16": "bfloat16 (AMX)",
    "amx_tile": "AMX",
}
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
MEMORY_USED = Path("/sys/fs/cgroup/memory.current")
MEMORY_STAT = Path("/sys/fs/cgroup/memory.stat")
DRIVER = Path("/proc/driver/nvidia/version")
SHARED_MEMORY = Path("/dev/shm")
RAY_FILES = Path("/tmp")
MIN_SHARED_GIB = 1.0
"""For a small model: weights of two versions and Ray's objects."""
MIN_MEMORY_GIB = 4.0
"""For Ray, Redis, an engine and a learner of a tiny policy."""
MIN_OPEN_FILES = 4096
MAX_DISK_USE = 0.95
"""Ray stores no objects on a fuller disk."""
LEAST_DRIVERS = {"12": 525, "13": 580}
"""CUDA's major version -> the driver's."""


def check_machine() -> Iterator[InstallationFinding]:
    yield _check_cpu_features()
    yield _check_cpus()
    yield _check_memory()
    yield from _check_shared_memory()
    yield _check_open_files()
    yield _check_disk()
    yield _check_gpus()


def _check_cpu_features(path: Path = Path("/proc/cpuinfo")) -> InstallationFinding:
    subject, machine = "CPU features", platform.machine()
    if machine not in X86 or not path.is_file():
        return InstallationFinding.of(subject, machine)
    match = re.search(r"^flags\s*:(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    flags = set(match[1].split()) if match else set[str]()
    found = ", ".join(name for flag, name in CPU_FEATURES.items() if flag in flags) or "neither AVX2 nor AVX-512"
    if "avx512f" not in flags:
        advice = (
            "vLLM's CPU engine is made for AVX-512; take actor_infer.strategy_args.strategy_name: hf_infer if it fails"
        )
        return InstallationFinding.of(subject, found, advice)
    if not flags & {"avx512_bf16", "amx_bf16"}:
        return InstallationFinding.of(subject, found, "bfloat16 is emulated, and slow: take dtype: float32 on the CPU")
    return InstallationFinding.of(subject, found)


def _check_cpus() -> InstallationFinding:
    cpus, quota = len(os.sched_getaffinity(0)), _cpu_quota()
    if quota is not None and quota < cpus:
        found = f"{cpus}, of which this container may use {quota:g}"
        whole = max(int(quota), 1)
        return InstallationFinding.of("CPUs", found, f"Ray counts all of them: `ray start --num-cpus {whole}`")
    advice = "" if cpus > 1 else "an engine and a learner run at once, and will wait for each other"
    return InstallationFinding.of("CPUs", str(cpus), advice)


def _cpu_quota() -> float | None:
    """Return the container's limit, if any."""
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _check_memory() -> InstallationFinding:
    memory = psutil.virtual_memory()
    available, total, where = memory.available, memory.total, ""
    limit = _read_bytes(MEMORY_LIMIT)
    if limit is not None and limit < total:
        available, total = min(available, limit - _read_used_memory()), limit
        where = ", the container's limit"
    found = f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB available{where}"
    advice = "" if available >= MIN_MEMORY_GIB * 2**30 else "end other programs, or give the container more"
    return InstallationFinding.of("memory", found, advice)


def _read_used_memory() -> int:
    """Return the container's memory without inactive page cache, which the kernel frees on demand."""
    used = _read_bytes(MEMORY_USED) or 0
    try:
        match = re.search(r"^inactive_file (\d+)$", MEMORY_STAT.read_text(), re.MULTILINE)
    except OSError:
        return used
    return max(used - int(match[1]), 0) if match else used


def _read_bytes(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # `max`
        return None


def _check_shared_memory() -> Iterator[InstallationFinding]:
    if not SHARED_MEMORY.is_dir():
        yield InstallationFinding("shared memory", "advice", f"no {SHARED_MEMORY}: set weights.transport: fs")
        return
    free_gib = shutil.disk_usage(SHARED_MEMORY).free / 2**30
    advice = "`docker run --shm-size 4g`, or weights.transport: fs" if free_gib < MIN_SHARED_GIB else ""
    yield InstallationFinding.of("shared memory", f"{free_gib:.1f} GiB free in {SHARED_MEMORY}", advice)


def _check_open_files() -> InstallationFinding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    is_low = soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES
    best = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    return InstallationFinding.of("open files", found, f"`ulimit -n {best}` before the start" if is_low else "")


def _check_disk() -> InstallationFinding:
    usage = shutil.disk_usage(RAY_FILES)
    share = usage.used / usage.total
    found = f"{usage.free / 2**30:.0f} GiB free in {RAY_FILES}, {share:.0%} used"
    advice = "Ray keeps its files there, and none on a disk as full: free some, or `ray start --temp-dir`"
    return InstallationFinding.of("disk", found, advice if share > MAX_DISK_USE else "")


def _check_gpus() -> InstallationFinding:
    gpus, cuda = count_gpus(), _cuda_version()
    if not gpus:
        advice = "torch for CUDA is installed: it works on the CPU, 'offbeat[cpu]' is smaller" if cuda else ""
        return InstallationFinding.of("GPUs", "none, so everything runs on the CPU", advice)
    if cuda is None or not is_installed("vllm"):
        return InstallationFinding.of("GPUs", f"{gpus}, unused", "pip install 'offbeat[gpu]'")
    driver, least = _driver_version(), LEAST_DRIVERS.get(cuda, 0)
    if driver is not None and driver < least:
        detail = f"{gpus}, but driver {driver} is too old for CUDA {cuda}: install {least} or newer"
        return InstallationFinding("GPUs", "problem", detail)
    return InstallationFinding.of("GPUs", f"{gpus}, CUDA {cuda}, driver {driver or 'unknown'}")


def _cuda_version() -> str | None:
    """Return the major version of torch's CUDA."""
    for each in distributions():
        name = str(each.metadata["Name"])
        if match := re.fullmatch(r"nvidia-cuda-runtime-cu(\d+)", name):
            return match[1]
        if name == "nvidia-cuda-runtime":
            return each.version.partition(".")[0]
    return None


def _driver_version() -> int | None:
    try:
        match = re.search(r"Module\s+(?:for \S+\s+)?(\d+)\.", DRIVER.read_text())
    except OSError:
        return None
    return int(match[1]) if match else None
