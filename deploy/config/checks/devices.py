import socket
from collections.abc import Iterator, Sequence

from offbeat.deploy.config.checks.memory import UTILIZATION_KEY, check_memory
from offbeat.deploy.config.checks.transport import check_transport
from offbeat.deploy.config.device_plan import ClusterNode, plan_devices
from offbeat.deploy.config.device_roles import check_mappings
from offbeat.deploy.config.devices import count_gpus
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.sharing import offload_problem
from offbeat.services.generation.config import UTILIZATION, app_name
from offbeat.services.gpu_memory import read_memory_gib, shares_memory
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.config.issue import ConfigIssue


def check_devices(config: RunConfig, nodes: Sequence[ClusterNode] | None) -> Iterator[ConfigIssue]:
    """nodes: of the cluster; None: this machine."""
    infer, train = config.actor_infer, config.actor_train
    if infer.device == "cpu" and infer.engine.gpu_memory_utilization not in (None, UTILIZATION):
        yield ConfigIssue(UTILIZATION_KEY, "has no effect with device=cpu: leave it out")
    if config.takes_turns and (problem := offload_problem(config)):
        yield ConfigIssue(f"{ENGINE}.enable_sleep_mode", problem)
    yield from check_mappings(config)
    owns_engines = infer.app in (None, app_name(config.exp_name))
    nodes = [local_node()] if nodes is None else nodes
    plan = plan_devices(config, nodes, owns_engines=owns_engines)
    yield from plan.issues
    yield from check_transport(config, plan, owns_engines=owns_engines)
    has_gpus = "cuda" in (infer.device, train.device) or any(reward.gpus_per_replica for reward in config.rewards)
    if not plan.issues and has_gpus:
        yield from check_memory(config, plan, nodes, owns_engines=owns_engines)


def local_node() -> ClusterNode:
    gpus = count_gpus()
    return ClusterNode("", socket.gethostname(), gpus, read_memory_gib() if gpus else None, shares_memory())
