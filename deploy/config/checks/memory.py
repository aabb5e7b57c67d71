"""Least memory of a run's processes on GPUs: weights, gradients and AdamW's moments, without activations."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from offbeat.deploy.config.checks.weight_files import weight_shapes
from offbeat.deploy.config.device_plan import ClusterNode, DevicePlan
from offbeat.deploy.config.device_roles import reward_role
from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.config.sharing import engine_utilization
from offbeat.services.generation.config import UTILIZATION, EngineModelArgs, VllmConfig
from offbeat.services.reward.kinds.model_config import (
    JudgeModelArgs,
    LlmJudgeConfig,
    RewardModelArgs,
    RewardModelConfig,
)
from offbeat.trainer.config.actor_train import ModelArgs
from offbeat.trainer.config.aliases import ENGINE
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.config.roles import ReferenceConfig, TeacherConfig
from offbeat.trainer.config.scored_roles import scored_roles

UTILIZATION_KEY = f"{ENGINE}.gpu_memory_utilization"
MAX_SHARED_UTILIZATION = 0.9
"""Of an engine beside a learner."""
SMALLER_ENGINE = frozenset({"quantization", "cpu_offload_gb"})
"""Arguments of engines that hold less than the weights in their dtype."""
GIB = 2**30


class _Memory(NamedTuple):
    """Memory of a GPU that a role gets."""

    gib: float
    where: str
    """` on ADDRESS`, of several nodes; else empty."""

    def __str__(self) -> str:
        return f"{self.gib:.1f} GiB{self.where}"


class _Nodes:
    """Nodes with GPUs."""

    def __init__(self, nodes: Sequence[ClusterNode]) -> None:
        self._nodes = [node for node in nodes if node.gpus]

    def memory(self, node_ids: Iterable[str]) -> _Memory | None:
        """Return the least memory of these nodes' GPUs, or the most of all if Ray chooses; None if unknown."""
        chosen = set(node_ids)
        nodes = [node for node in self._nodes if not chosen or node.node_id in chosen]
        sizes = {node: node.memory_gib for node in nodes if node.memory_gib is not None}
        if not sizes or (not chosen and len(sizes) < len(nodes)):  # one that is unknown may have the most
            return None
        node = (min if chosen else max)(sizes, key=sizes.__getitem__)
        return _Memory(sizes[node], f" on {node.address}" if len(self._nodes) > 1 else "")


def check_memory(
    config: RunConfig, plan: DevicePlan, nodes: Sequence[ClusterNode], *, owns_engines: bool
) -> Iterator[ConfigIssue]:
    """Yield roles that the memory of a GPU can't hold, without a learner that users attach.

    nodes: as of the plan. owns_engines: as in `plan_devices`.
    """
    known = _Nodes(nodes)
    on_gpus, is_managed = config.actor_train.device == "cuda", config.control.learner == "managed"
    learner = known.memory(node.node_id for node in plan.learner if node.num_ranks > node.num_critics)
    if plan.is_shared:
        yield from _check_shared(config, plan, known)
    elif learner is not None and is_managed and on_gpus:
        yield from _check_learner(config, learner)
    engines = known.memory(slot.node_id for slot in plan.engines)
    if engines is not None and owns_engines and config.uses_engine and config.actor_infer.device == "cuda":
        yield from _check_engine(config, plan, engines)
    if on_gpus:
        yield from _check_own(config, plan, known)
    yield from _check_rewards(config, plan, known)


def _check_shared(config: RunConfig, plan: DevicePlan, nodes: _Nodes) -> Iterator[ConfigIssue]:
    """Yield a memory too small for engine and learner."""
    share = engine_utilization(config, plan)
    if share > MAX_SHARED_UTILIZATION:
        yield ConfigIssue(
            UTILIZATION_KEY,
            f"{share:g} leaves {1 - share:.0%} of a GPU to the learner on it: take at most {MAX_SHARED_UTILIZATION:g}, or "
            "another device_mapping",
        )
        return
    needed_gib = learner_gib(config, num_loading(config))
    memory = nodes.memory(slot.node_id for slot in plan.engines if slot.is_shared)
    if memory is None or needed_gib is None:
        return
    if config.takes_turns:
        yield from _check_turns(config, share, memory)
    elif share * memory.gib + needed_gib > memory.gib:
        room = max(0.0, 1 - needed_gib / memory.gib)
        advice = f"take at most {room:.2f}, or" if room > 0.05 else "take"
        yield ConfigIssue(
            UTILIZATION_KEY,
            f"the engine's {share * memory.gib:.1f} GiB ({share:g}) and "
            f"{_say_learner(config, needed_gib, num_loading(config))} exceed the GPU's {memory}: "
            f"{advice} more devices, {_learner_advice(config)}",
        )


def _check_turns(config: RunConfig, share: float, memory: _Memory) -> Iterator[ConfigIssue]:
    """Yield a memory that can't hold the learner alone, or the engine with the versions in it while it loads one."""
    yield from _check_learner(config, memory, "also while the engine sleeps")
    loading = num_loading(config) * weights_gib(config)
    if share * memory.gib + loading > memory.gib:
        yield ConfigIssue(
            UTILIZATION_KEY,
            f"the engine's {share * memory.gib:.1f} GiB ({share:g}) and {loading:.1f} GiB of {num_loading(config)} "
            f"published version(s), copies of a load included, exceed the GPU's {memory}: take less, "
            "weights.keep_versions: 1, or weights.transport: shm",
        )


def _check_learner(config: RunConfig, memory: _Memory, when: str = "") -> Iterator[ConfigIssue]:
    needed_gib = learner_gib(config, num_held(config))
    if needed_gib is not None and needed_gib > memory.gib:
        yield ConfigIssue(
            "actor_train.strategy_args.zero_stage",
            f"{_say_learner(config, needed_gib, num_held(config))} exceed the GPU's {memory}"
            f"{', ' if when else ''}{when}: take more devices, {_learner_advice(config)}",
        )


def _say_learner(config: RunConfig, needed_gib: float, num_versions: int) -> str:
    parts = "weights, gradients and moments"
    if num_versions:
        parts = f"weights, gradients, moments and {num_versions} published version(s)"
    of_all = ", whose warm start trains all weights," if _warms_all_weights(config) else ""
    return f"at least {needed_gib:.1f} GiB of the learner's {parts}{of_all}"


def _learner_advice(config: RunConfig) -> str:
    train = config.actor_train
    ways = ["zero_stage", "lora_target"]
    is_wide = train.training_args.optim != "adamw_8bit" and train.strategy_args.strategy_name == "deepspeed_train"
    if is_wide and (train.model_args.lora_target is None or _warms_all_weights(config)):
        ways.append("training_args.optim adamw_8bit")
    if num_held(config):
        ways.append("weights.transport shm")
    return f"{', '.join(ways[:-1])} or {ways[-1]}"


def _check_engine(config: RunConfig, plan: DevicePlan, memory: _Memory) -> Iterator[ConfigIssue]:
    """Yield an engine whose weights exceed its share of its devices."""
    engine = config.actor_infer.engine
    if _is_smaller(engine):
        return
    share = engine_utilization(config, plan)
    needed_gib = count_weights(config.pretrain) * _width(config.actor_infer.model_args) / engine.world_size / GIB
    if needed_gib >= share * memory.gib:
        yield ConfigIssue(
            f"{ENGINE}.tensor_parallel_size",
            f"the engine's weights take {needed_gib:.1f} GiB of each of its {engine.world_size} device(s), and its share "
            f"({share:g}) of {memory} is {share * memory.gib:.1f} GiB: take more devices per engine",
        )


def _check_own(config: RunConfig, plan: DevicePlan, nodes: _Nodes) -> Iterator[ConfigIssue]:
    """Yield roles too large for devices of their own."""
    needed_gib = critic_gib(config, config.num_critic_processes)
    memory = nodes.memory(node.node_id for node in plan.learner if node.num_critics)
    if memory is not None and needed_gib > memory.gib and config.control.learner == "managed":
        yield ConfigIssue(
            "critic.num_processes",
            f"at least {needed_gib:.1f} GiB of the critic's weights, gradients and moments exceed the GPU's "
            f"{memory}: take more processes with zero_stage or fsdp2_train, or a smaller model",
        )
    for role in scored_roles(config, config.reference):
        frozen_gib = _frozen_gib(config, role.config)
        memory = nodes.memory(slot.node_id for slot in plan.scorers.get(role.name, ()))
        if memory is not None and frozen_gib > memory.gib:
            yield ConfigIssue(
                f"{role.name}.strategy_args.placement",
                f"a process of the service holds the whole model, {frozen_gib:.1f} GiB, and the GPU has {memory}: "
                "take placement learner with deepspeed_infer, or a smaller model",
            )


def _check_rewards(config: RunConfig, plan: DevicePlan, nodes: _Nodes) -> Iterator[ConfigIssue]:
    """Yield rewards' models too large for their devices."""
    for index, reward in enumerate(config.rewards):
        if not isinstance(reward, RewardModelConfig | LlmJudgeConfig) or not reward.gpus_per_replica:
            continue
        if isinstance(reward, LlmJudgeConfig) and _is_smaller(reward.strategy_args.strategy_config):
            continue
        whole_gib = count_weights(str(reward.model_folder)) * _width(reward.model_args) / GIB
        needed_gib, share = whole_gib / reward.gpus_per_replica, 1.0
        if isinstance(reward, LlmJudgeConfig):
            share = reward.strategy_args.strategy_config.gpu_memory_utilization or UTILIZATION
        memory = nodes.memory(slot.node_id for slot in plan.scorers.get(reward_role(index), ()))
        if memory is not None and needed_gib > share * memory.gib:
            yield ConfigIssue(
                f"{reward_role(index)}.model_args.model_name_or_path",
                f"its weights take {needed_gib:.1f} GiB of each of a replica's {reward.gpus_per_replica} device(s), "
                f"which has {share * memory.gib:.1f} GiB of {memory} for them: take a narrower dtype, a smaller "
                "model, or more devices for each replica of a judge",
            )


def _is_smaller(engine: VllmConfig) -> bool:
    return bool(SMALLER_ENGINE.intersection(engine.model_extra or ()))


def num_held(config: RunConfig) -> int:
    """Return the published versions in rank 0's GPU memory: those that are kept, and one on its way."""
    return config.weights.keep_versions + 1 if config.weights.transport in ("ipc", "nccl") else 0


def num_loading(config: RunConfig) -> int:
    """Return the versions in the memory of a GPU whose engine loads one by `ipc`: those kept, and a copy at each end."""
    return config.weights.keep_versions + 2 if config.weights.transport == "ipc" else num_held(config)


def weights_gib(config: RunConfig) -> float:
    """Return the memory of a published version; 0 for a tiny or unreadable policy."""
    is_wide = config.actor_train.model_args.dtype == "float32" and config.weights.dtype == "as_trained"
    return count_weights(config.pretrain) * (4 if is_wide else 2) / GIB


def learner_gib(config: RunConfig, num_versions: int = 0) -> float | None:
    """Return the least memory of a learner's process, critic, frozen models and published versions in it included; None
    for a tiny policy.
    """
    num_weights = count_weights(config.pretrain)
    if not num_weights:
        return None
    args, num_processes = config.actor_train.model_args, config.actor_train.num_processes
    policy = _trained_gib(config, num_weights, args, num_processes)
    critic = critic_gib(config, num_processes) if not config.num_critic_processes else 0.0
    frozen = sum(_frozen_gib(config, role) for role in _frozen_roles(config))
    needed_gib = policy + critic + frozen + num_versions * weights_gib(config)
    if not _warms_all_weights(config):
        return needed_gib
    return max(needed_gib, _trained_gib(config, num_weights, args.without_adapters, num_processes))


def _warms_all_weights(config: RunConfig) -> bool:
    return config.warm_start is not None and config.actor_train.model_args.lora_target is not None


def critic_gib(config: RunConfig, num_processes: int) -> float:
    """Return the least memory of a process with a critic that is a model of its own; 0 without one."""
    if not config.has_own_critic or not num_processes:
        return 0.0
    args = config.actor_train.model_args.of_role(config.critic.model_args)
    return _trained_gib(config, count_weights(config.critic_folder or config.pretrain), args, num_processes)


def _trained_gib(config: RunConfig, num_weights: int, args: ModelArgs, num_processes: int) -> float:
    strategy, optim = config.actor_train.strategy_args, config.actor_train.training_args.optim
    zero = strategy.strategy_config.get("zero_optimization")
    offloads = zero if isinstance(zero, dict) else ()
    # DeepSpeed's optimizer is sharded for 16 bits at zero_stage 0, too
    stage = 3 if strategy.strategy_name == "fsdp2_train" else max(strategy.zero_stage, int(args.dtype != "float32"))
    moments = (2 if optim == "adamw_8bit" else 8) + (0 if args.dtype == "float32" else 4)  # with the float32 copy
    is_full = args.lora_target is None  # else gradients and moments are those of adapters
    parts = [  # by the ZeRO stage that shards them
        (moments if is_full and (stage == 0 or "offload_optimizer" not in offloads) else 0, 1),
        (_width(args) if is_full else 0, 2),
        (_width(args) if "offload_param" not in offloads else 0, 3),
    ]
    return num_weights * sum(size / (num_processes if stage >= at else 1) for size, at in parts) / GIB


def _frozen_roles(config: RunConfig) -> Iterator[ReferenceConfig | TeacherConfig]:
    """Yield roles whose weights the learner's processes hold beside the policy's."""
    reference = config.reference
    is_policy = reference.model_args.model_name_or_path is None and config.actor_train.model_args.lora_target
    roles: list[ReferenceConfig | TeacherConfig] = [reference] if config.needs_reference and not is_policy else []
    roles += config.teacher.values() if config.distills else ()
    yield from (role for role in roles if role.strategy_args.placement == "learner")


def _frozen_gib(config: RunConfig, role: ReferenceConfig | TeacherConfig) -> float:
    """Return the memory of a process's part of a frozen model."""
    strategy, train = role.strategy_args, config.actor_train
    args = train.model_args.of_role(role.model_args)
    whole_gib = count_weights(role.model_args.model_name_or_path or config.pretrain) * _width(args) / GIB
    is_split = strategy.strategy_name == "deepspeed_infer" or train.strategy_args.copy_size > 1
    return whole_gib / train.num_processes if is_split and strategy.placement == "learner" else whole_gib


def _width(args: ModelArgs | EngineModelArgs | RewardModelArgs | JudgeModelArgs) -> float:
    """Return the least bytes of a weight: of 4 bits, in all but embeddings."""
    if isinstance(args, ModelArgs) and args.load_in_4bit:
        return 0.5
    return 4 if args.dtype == "float32" else 2


def count_weights(model: str) -> int:
    """Return the weights of a model's folder; 0 for a tiny or unreadable one, which has its own error."""
    try:
        return 0 if model == "tiny" else sum(math.prod(shape) for _, shape in weight_shapes(model))
    except (OSError, ValueError):
        return 0
