import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence

from offbeat.deploy.config.checks.memory import UTILIZATION_KEY, check_memory
from offbeat.deploy.config.device_plan import ClusterNode, plan_devices
from offbeat.deploy.config.device_roles import check_mappings
from offbeat.deploy.config.devices import count_gpus
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.sharing import offload_problem
from offbeat.services.generation.config import UTILIZATION, app_name
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.config.issue import ConfigIssue

MEMORY_TIMEOUT_S = 10.0


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
    has_gpus = "cuda" in (infer.device, train.device) or any(reward.gpus_per_replica for reward in config.rewards)
    if not plan.issues and has_gpus:
        yield from check_memory(config, plan, read_memory_gib(), owns_engines=owns_engines)


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
