"""The transport of weights that devices allow."""

from collections.abc import Sequence

from offbeat.deploy.config.checks.memory import check_memory
from offbeat.deploy.config.checks.transport import maps_weights
from offbeat.deploy.config.device_plan import ClusterNode, DevicePlan, device_numbers, plan_devices
from offbeat.deploy.config.run import RunConfig
from offbeat.services.generation.config import app_name

FILE_KEYS = frozenset({"url", "anchor_every"})
"""Keys of versions in files."""


def choose_transport(config: RunConfig, nodes: Sequence[ClusterNode]) -> RunConfig:
    """Return the run with `weights.transport: ipc` where it is left out: if its one engine is on the learner's one GPU,
    whose memory holds the published versions, too, as far as it is known. A `device_mapping` of both keeps them there,
    whatever GPUs are added before a restart.

    nodes: as of `plan_devices`.
    """
    weights = config.weights
    if "transport" in weights.model_fields_set or FILE_KEYS & weights.model_fields_set or not _is_mappable(config):
        return config
    plan = plan_devices(config, nodes)
    if not maps_weights(config, plan) or not _node_of(plan, nodes).shares_memory:
        return config
    mapping = {"device_mapping": device_numbers(config, nodes, plan.engines[0])}
    roles = {name: getattr(config, name).model_copy(update=mapping) for name in ("actor_infer", "actor_train")}
    chosen = config.model_copy(update={"weights": weights.model_copy(update={"transport": "ipc"}), **roles})
    before, after = (set(check_memory(each, plan, nodes, owns_engines=True)) for each in (config, chosen))
    return config if after - before else chosen


def _is_mappable(config: RunConfig) -> bool:
    """Return whether the run's own engine is vLLM with whole weights, and the learner has them on its device."""
    infer = config.actor_infer
    zero = config.actor_train.strategy_args.strategy_config.get("zero_optimization")
    return (
        config.uses_engine
        and infer.app in (None, app_name(config.exp_name))
        and infer.strategy_args.strategy_name == "vllm"
        and infer.engine.max_lora_rank is None
        and not (isinstance(zero, dict) and "offload_param" in zero)
    )


def _node_of(plan: DevicePlan, nodes: Sequence[ClusterNode]) -> ClusterNode:
    return next(node for node in nodes if node.node_id == plan.engines[0].node_id)
