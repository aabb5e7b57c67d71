import json
import math
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from offbeat.deploy.config.device_plan import ClusterNode, DevicePlan, plan_devices
from offbeat.deploy.config.device_roles import check_mappings
from offbeat.deploy.config.devices import count_gpus
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.sharing import engine_utilization, offload_problem
from offbeat.services.generation.config import UTILIZATION, app_name
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.config.issue import ConfigIssue

UTILIZATION_KEY = f"{ENGINE}.gpu_memory_utilization"
MAX_SHARED_UTILIZATION = 0.9
"""Of an engine beside a learner."""
MEMORY_TIMEOUT_S = 10.0
GIB = 2**30


def check_devices(config: RunConfig, nodes: Sequence[ClusterNode] | None) -> Iterator[ConfigIssue]:
    """nodes: of the cluster; None: this machine."""
    infer, train = config.actor_infer, config.actor_train
    transport = config.weights.transport
    if transport in ("ipc", "nccl") and "cpu" in (infer.device, train.device):
        yield ConfigIssue(
            "weights.transport", f"{transport} transfers tensors between GPUs: on a CPU take shm, or fs across hosts"
        )
    if infer.device == "cpu" and infer.engine.gpu_memory_utilization not in (None, UTILIZATION):
        yield ConfigIssue(UTILIZATION_KEY, "has no effect with device=cpu: leave it out")
    if config.takes_turns and (problem := offload_problem(config)):
        yield ConfigIssue(f"{ENGINE}.enable_sleep_mode", problem)
    yield from check_mappings(config)
    owns_engines = infer.app in (None, app_name(config.exp_name))
    plan = plan_devices(config, [local_node()] if nodes is None else nodes, owns_engines=owns_engines)
    yield from plan.issues
    yield from _check_shared(config, plan, read_memory_gib() if plan.is_shared else None)


def local_node() -> ClusterNode:
    return ClusterNode("", socket.gethostname(), count_gpus())


def read_memory_gib() -> float | None:
    """Return the memory of this machine's smallest GPU, if known."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=MEMORY_TIMEOUT_S, check=True).stdout
        return min(float(line) for line in output.split()) / 1024
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _check_shared(config: RunConfig, plan: DevicePlan, memory_gib: float | None) -> Iterator[ConfigIssue]:
    """Yield a memory too small for engine and learner."""
    if not plan.is_shared:
        return
    share = engine_utilization(config, plan)
    if share > MAX_SHARED_UTILIZATION:
        yield ConfigIssue(
            UTILIZATION_KEY,
            f"{share:g} leaves {1 - share:.0%} of a GPU to the learner on it: take at most {MAX_SHARED_UTILIZATION:g}, or "
            "another device_mapping",
        )
        return
    needed_gib = learner_gib(config)
    if config.takes_turns:
        yield from _check_turns(config, share, needed_gib, memory_gib)
        return
    if memory_gib is None or needed_gib is None or share * memory_gib + needed_gib <= memory_gib:
        return
    room = max(0.0, 1 - needed_gib / memory_gib)
    advice = f"take at most {room:.2f}, or" if room > 0.05 else "take"
    yield ConfigIssue(
        UTILIZATION_KEY,
        f"the engine's {share * memory_gib:.1f} GiB ({share:g}) and at least {needed_gib:.1f} GiB of the learner's weights, "
        f"gradients and moments exceed the GPU's {memory_gib:.1f} GiB: {advice} more devices, zero_stage or lora_target",
    )


def _check_turns(
    config: RunConfig, share: float, needed_gib: float | None, memory_gib: float | None
) -> Iterator[ConfigIssue]:
    """Yield a memory that can't hold the learner alone, or the engine with the versions that GPU transports keep."""
    if memory_gib is None or needed_gib is None:
        return
    if needed_gib > memory_gib:
        yield ConfigIssue(
            "actor_train.strategy_args.zero_stage",
            f"at least {needed_gib:.1f} GiB of the learner's weights, gradients and moments exceed the GPU's "
            f"{memory_gib:.1f} GiB, also while the engine sleeps: take more devices, zero_stage or lora_target",
        )
    weights = config.weights
    held_gib = weights.keep_versions * weights_gib(config) if weights.transport in ("ipc", "nccl") else 0.0
    if share * memory_gib + held_gib > memory_gib:
        yield ConfigIssue(
            UTILIZATION_KEY,
            f"the engine's {share * memory_gib:.1f} GiB ({share:g}) and {held_gib:.1f} GiB of {weights.keep_versions} "
            f"published version(s) exceed the GPU's {memory_gib:.1f} GiB: take less, weights.keep_versions: 1, or "
            "weights.transport: shm",
        )


def weights_gib(config: RunConfig) -> float:
    """Return the memory of a published version; 0 for a tiny or unreadable policy."""
    try:
        num_weights = sum(map(_count_weights, Path(config.pretrain).glob("*.safetensors")))
    except (OSError, ValueError):
        return 0.0
    is_wide = config.actor_train.model_args.dtype == "float32" and config.weights.dtype == "as_trained"
    return num_weights * (4 if is_wide else 2) / GIB


def learner_gib(config: RunConfig) -> float | None:
    """Return the least memory of a learner's process: weights, gradients and AdamW's moments; None for a tiny
    policy."""
    if config.pretrain == "tiny":
        return None
    train = config.actor_train
    try:
        num_weights = sum(map(_count_weights, Path(config.pretrain).glob("*.safetensors")))
    except (OSError, ValueError):
        return None  # an unreadable model has its own error
    if not num_weights:
        return None
    bytes_of_weight = 4 if train.model_args.dtype == "float32" else 2
    if train.model_args.lora_target is not None:
        return num_weights * bytes_of_weight / GIB
    moments = 8 if train.model_args.dtype == "float32" else 12  # with the float32 copy
    stage = 3 if train.strategy_args.strategy_name == "fsdp2_train" else train.strategy_args.zero_stage
    parts = [(moments, 1), (bytes_of_weight, 2), (bytes_of_weight, 3)]  # moments, gradients, weights by ZeRO stage
    return num_weights * sum(size / (train.num_processes if stage >= at else 1) for size, at in parts) / GIB


def _count_weights(file: Path) -> int:
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
