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
    return infer.with_engine(gpu_memory_utilization=engine_utilization(config, plan))


def engine_utilization(config: RunConfig, plan: DevicePlan) -> float:
    """Return the engine's share of a GPU's memory."""
    engine = config.actor_infer.engine
    if engine.gpu_memory_utilization is not None:
        return engine.gpu_memory_utilization
    return SHARED_UTILIZATION if plan.is_shared and not engine.enable_sleep_mode else UTILIZATION


def choose_turns(config: RunConfig, nodes: Sequence[ClusterNode]) -> RunConfig:
    """Return the run with `enable_sleep_mode` set where it is left out: if engines are on the learner's devices, and the run
    is synchronous or other engines sample meanwhile.
    """
    infer = config.actor_infer
    if infer.engine.enable_sleep_mode is not None or not config.uses_engine or offload_problem(config):
        return config
    plan = plan_devices(config, nodes, owns_engines=infer.app in (None, app_name(config.exp_name)))
    has_others = any(not slot.is_shared for slot in plan.engines)
    if not plan.is_shared or not (has_others or config.max_staleness == 0):
        return config
    return config.model_copy(update={"actor_infer": infer.with_engine(enable_sleep_mode=True)})


def offload_problem(config: RunConfig) -> str:
    """Return why the learner can't leave its devices between steps; empty if it can."""
    train, strategy = config.actor_train, config.actor_train.strategy_args
    roles = {"reference": config.reference, **{f"teacher.{name}": each for name, each in config.teacher.items()}}
    for name, role in roles.items():
        if role.strategy_args.strategy_name == "deepspeed_infer":
            return f"{name} of deepspeed_infer can't leave the GPU between steps: take hf_infer or placement service"
    if strategy.strategy_name != "deepspeed_train":
        return ""
    trained = {"actor_train": train.model_args}
    if config.has_own_critic and not config.num_critic_processes:
        trained["critic"] = train.model_args.of_role(config.critic.model_args)
    for name, args in trained.items():
        if args.dtype != "float32" and strategy.zero_stage < 2:
            return (
                f"DeepSpeed's optimizer for {args.dtype} ({name}.model_args.dtype) can't leave the GPU at zero_stage "
                f"{strategy.zero_stage}: take zero_stage 2 or 3, or fsdp2_train"
            )
    zero = strategy.strategy_config.get("zero_optimization")
    if isinstance(zero, dict) and any(name.startswith("offload_") for name in zero):
        return "DeepSpeed moves no states beside zero_optimization.offload_*: leave one of them out"
    return ""
