"""The transport of weights that devices allow."""

from collections.abc import Sequence

from offbeat.deploy.config.checks.memory import check_memory
from offbeat.deploy.config.device_plan import ClusterNode, plan_devices
from offbeat.deploy.config.run import RunConfig
from offbeat.services.generation.config import app_name

FILE_KEYS = frozenset({"url", "anchor_every"})
"""Keys of versions in files."""


def choose_transport(config: RunConfig, nodes: Sequence[ClusterNode]) -> RunConfig:
    """Return the run with `weights.transport: ipc` where it is left out: if its one engine is on the learner's one GPU,
    whose memory holds the published versions, too, as far as it is known.

    nodes: as of `plan_devices`.
    """
    weights = config.weights
    if "transport" in weights.model_fields_set or FILE_KEYS & weights.model_fields_set or not _is_mappable(config):
        return config
    plan = plan_devices(config, nodes)
    shared = [slot.node_id for slot in plan.engines if slot.is_shared]
    if len(shared) != 1 or len(plan.engines) != 1 or not all(n.shares_memory for n in nodes if n.node_id in shared):
        return config
    chosen = config.model_copy(update={"weights": weights.model_copy(update={"transport": "ipc"})})
    issues = (set(check_memory(each, plan, nodes, owns_engines=True)) for each in (config, chosen))
    without, with_versions = issues
    return config if with_versions - without else chosen


def _is_mappable(config: RunConfig) -> bool:
    """Return whether vLLM in one process could map whole weights of a learner of one process."""
    infer, train = config.actor_infer, config.actor_train
    zero = train.strategy_args.strategy_config.get("zero_optimization")
    return (
        config.uses_engine
        and infer.app in (None, app_name(config.exp_name))
        and infer.strategy_args.strategy_name == "vllm"
        and infer.engine.max_lora_rank is None
        and infer.engine.world_size == 1
        and train.num_processes == 1
        and not config.num_critic_processes
        and not (isinstance(zero, dict) and "offload_param" in zero)
    )
