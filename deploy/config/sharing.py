"""Engines and learner on the same GPUs: in turns, or side by side with shares of the memory."""

from collections.abc import Sequence

from offbeat.deploy.config.device_plan import ClusterNode, DevicePlan, plan_devices
from offbeat.deploy.config.run import RunConfig
from offbeat.services.generation.config import UTILIZATION, GenerationConfig, app_name

SHARED_UTILIZATION = 0.45
"""Default share of the engine in the memory of a GPU on which the learner stays, too."""


def with_utilization(config: RunConfig, plan: DevicePlan) -> GenerationConfig:
    """Return `actor_infer` with the engine's share of a GPU's memory."""
    infer = config.actor_infer
    if infer.device == "cpu":
        return infer
    return _with_engine(infer, gpu_memory_utilization=engine_utilization(config, plan))


def engine_utilization(config: RunConfig, plan: DevicePlan) -> float:
    """Return the engine's share of a GPU's memory."""
    engine = config.actor_infer.engine
    if engine.gpu_memory_utilization is not None:
        return engine.gpu_memory_utilization
    return SHARED_UTILIZATION if plan.is_shared and not engine.enable_sleep_mode else UTILIZATION


def choose_turns(config: RunConfig, nodes: Sequence[ClusterNode]) -> RunConfig:
    """Return the run with `enable_sleep_mode` set where it is left out: in synchronous runs that share devices."""
    infer = config.actor_infer
    if infer.engine.enable_sleep_mode is not None or config.max_staleness > 0 or not config.uses_engine:
        return config
    if not plan_devices(config, nodes, owns_engines=infer.app in (None, app_name(config.exp_name))).is_shared:
        return config
    return config.model_copy(update={"actor_infer": _with_engine(infer, enable_sleep_mode=True)})


def _with_engine(infer: GenerationConfig, **values: object) -> GenerationConfig:
    engine = infer.engine.model_copy(update=values)
    strategy = infer.strategy_args.model_copy(update={"strategy_config": engine})
    return infer.model_copy(update={"strategy_args": strategy})
