"""Devices of a run on a cluster.

Invariant: a plan is a function of configuration and nodes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from offbeat.deploy.config.device_roles import CRITIC, REWARDS, role_mappings, roles_with_own_devices
from offbeat.deploy.config.run import RunConfig
from offbeat.services.devices import EngineDevices
from offbeat.trainer.config.issue import ConfigIssue
from offbeat.trainer.engines.node_ranks import NodeRanks, split_ranks


class ClusterNode(NamedTuple):
    """Nodes are numbered by address."""

    node_id: str
    address: str
    gpus: int
    memory_gib: float | None = None
    """Of its smallest GPU, if known."""
    shares_memory: bool = True
    """Whether CUDA IPC works on it."""


class LearnerNode(NamedTuple):
    """A node's part of the learner."""

    node_id: str
    num_ranks: int
    devices: tuple[int, ...] = ()
    """Numbers on the node; empty on a CPU."""
    num_exclusive: int = 0
    """Devices without an engine."""
    num_critics: int = 0
    """The last of `num_ranks`, of a critic with processes of its own."""

    @property
    def ranks(self) -> NodeRanks:
        return NodeRanks(self.num_ranks - self.num_critics, self.num_critics)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    engines: tuple[EngineDevices, ...] = ()
    """Of engines; empty: Ray chooses."""
    learner: tuple[LearnerNode, ...] = ()
    """Rank 0's node first; empty: Ray chooses."""
    scorers: Mapping[str, tuple[EngineDevices, ...]] = field(default_factory=dict[str, tuple[EngineDevices, ...]])
    """Devices of scoring services and rewards by role, an item per replica; without: Ray chooses."""
    is_shared: bool = False
    """Whether an engine and the learner share a device."""
    issues: tuple[ConfigIssue, ...] = field(default=())


class _Numbering:
    """Devices of the cluster in order."""

    def __init__(self, nodes: Sequence[ClusterNode], per_node: int | None) -> None:
        fitting = [node for node in sorted(nodes, key=lambda each: each[1::-1]) if node.gpus >= (per_node or 1)]
        self.devices = [(node.node_id, index) for node in fitting for index in range(per_node or node.gpus)]
        self.sizes = [per_node or node.gpus for node in fitting]
        self.largest = max(self.sizes, default=0)
        self._reserved = set[int]()
        self.largest_node = max((node.gpus for node in nodes), default=0)

    def __str__(self) -> str:
        sizes = " + ".join(map(str, self.sizes))
        return f"{len(self.devices)} device(s)" + (f" ({sizes} on {len(self.sizes)} nodes)" if sizes else "")

    def reserve(self, numbers: Sequence[int]) -> None:
        self._reserved |= set(numbers)

    def free(self, taken: Sequence[int]) -> list[int]:
        return [number for number in range(len(self.devices)) if number not in self._reserved.union(taken)]

    def place(self, numbers: Sequence[int]) -> EngineDevices:
        """Return devices of one node."""
        return EngineDevices(self.devices[numbers[0]][0], tuple(self.devices[number][1] for number in numbers))

    def numbers_of(self, devices: EngineDevices) -> tuple[int, ...]:
        return tuple(self.devices.index((devices.node_id, index)) for index in devices.devices)

    def split(self, numbers: Sequence[int]) -> dict[str, list[int]]:
        by_node: dict[str, list[int]] = {}
        for number in numbers:
            by_node.setdefault(self.devices[number][0], []).append(number)
        return by_node

    def split_whole(self, numbers: Sequence[int], size: int) -> list[list[int]]:
        """Return groups of `size` devices of one node."""
        return [
            group[start : start + size]
            for group in self.split(numbers).values()
            for start in range(0, len(group) - size + 1, size)
        ]


def plan_devices(config: RunConfig, nodes: Sequence[ClusterNode], *, owns_engines: bool = True) -> DevicePlan:
    """Place engines and learner. owns_engines: False for an engine of the deploy file.

    A learner that users attach is not placed.
    """
    infer, train = config.actor_infer, config.actor_train
    numbering = _Numbering(nodes, config.num_gpus_per_node)
    needs_engines = owns_engines and infer.device == "cuda"
    is_managed = config.control.learner == "managed"
    issues = [
        *_check_own(config, numbering, needs_engines),
        *_check_engines(config, numbering, needs_engines),
        *_check_mappings(config, numbering, needs_engines),
    ]
    issues += _check_learner(config, nodes, numbering) if is_managed else ()
    if issues:
        return DevicePlan(issues=tuple(dict.fromkeys(issues)))
    own = _own_numbers(config, numbering)
    numbering.reserve([number for numbers in own.values() for number in numbers])
    engines, learner = _numbers(config, numbering, needs_engines)
    issues += _check_room(config, needs_engines, engines, own)
    learner, critic = learner if is_managed else [], own.pop(CRITIC, [])
    common = sorted(set(engines) & set(learner))
    is_mapped = any(mapping is not None for _, mapping in role_mappings(config))
    if (
        not is_mapped
        and not common
        and (train.device == "cpu" or train.num_processes + len(critic) <= numbering.largest)
    ):
        engines, learner, critic, own, issues = [], [], [], {}, []  # Ray counts the devices of several runs
    size = infer.engine.world_size
    groups = _split(engines, size)
    own_groups = {
        role.name: _split(own[role.name], role.per_process)
        for role in roles_with_own_devices(config)
        if role.name in own
    }
    for name, of_role in {"actor_infer": groups, **own_groups}.items():
        for position, group in enumerate(of_role):
            if len(numbering.split(group)) > 1:
                message = f"replica {position} takes devices {group} of several nodes: its devices are on one node"
                issues.append(ConfigIssue(f"{name}.device_mapping", message))
    slots = tuple(numbering.place(group)._replace(is_shared=bool(set(group) & set(common))) for group in groups)
    scoring = {name: tuple(map(numbering.place, of_role)) for name, of_role in own_groups.items()}
    if not is_managed:
        parts = ()
    elif train.device == "cpu":
        parts = _cpu_nodes(config, nodes)
    else:
        parts = _gpu_nodes(numbering, learner, critic, common)
    return DevicePlan(slots, parts, scoring, bool(common), tuple(issues))


def device_numbers(config: RunConfig, nodes: Sequence[ClusterNode], devices: EngineDevices) -> tuple[int, ...]:
    """Return planned devices as a `device_mapping`."""
    return _Numbering(nodes, config.num_gpus_per_node).numbers_of(devices)


def _split(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def _numbers(config: RunConfig, numbering: _Numbering, needs_engines: bool) -> tuple[list[int], list[int]]:
    """Return the devices of engines and learner: mapped, else free, else shared ones."""
    infer, train = config.actor_infer, config.actor_train
    learner = list(train.device_mapping or ())
    engines = list(infer.device_mapping or ()) if needs_engines else []
    if needs_engines and not engines:
        size, count = infer.engine.world_size, infer.num_replicas
        for candidates in (numbering.free(learner), numbering.free(())):
            whole = numbering.split_whole(candidates, size)
            engines = [number for group in whole[:count] for number in group]
            if len(whole) >= count:
                break
    if train.device == "cuda" and not learner:
        free = numbering.free(engines)
        split = sorted(numbering.split(free).values(), key=len)
        fitting = [group for group in split if len(group) >= train.num_processes]
        pool = fitting[0] if fitting else free + engines[::-1]
        learner = sorted(pool[: train.num_processes])
    return engines, learner


def _own_numbers(config: RunConfig, numbering: _Numbering) -> dict[str, list[int]]:
    """Return the devices of roles with their own, by default the last free ones."""
    mapped = {number for _, mapping in role_mappings(config) for number in mapping or ()}
    free = numbering.free(sorted(mapped))
    numbers: dict[str, list[int]] = {}
    for role in roles_with_own_devices(config):
        if role.mapping is not None:
            numbers[role.name] = list(role.mapping)
            continue
        whole = numbering.split_whole(free, role.per_process)
        chosen = whole[max(0, len(whole) - role.num_devices // role.per_process) :]
        numbers[role.name] = [number for group in chosen for number in group]
        free = [number for number in free if number not in numbers[role.name]]
    return numbers


def _check_room(
    config: RunConfig, needs_engines: bool, engines: Sequence[int], own: Mapping[str, Sequence[int]]
) -> Iterator[ConfigIssue]:
    """Yield roles for which mappings and nodes leave too few devices, or too few on one node."""
    infer, size = config.actor_infer, config.actor_infer.engine.world_size
    parts = [
        (f"{role.name}.{role.count_key}", role.num_devices, role.per_process, own[role.name])
        for role in roles_with_own_devices(config)
    ]
    if needs_engines:
        parts.append(("actor_infer.num_replicas", infer.num_replicas * size, size, engines))
    for path, needed, per_process, devices in parts:
        if len(devices) < needed:
            yield ConfigIssue(
                path,
                f"{needed // per_process} of {per_process} device(s), on one node each, are needed, and the other roles "
                f"leave {len(devices) // per_process}: take fewer, or another device_mapping",
            )


def _cpu_nodes(config: RunConfig, nodes: Sequence[ClusterNode]) -> tuple[LearnerNode, ...]:
    """Place processes on CPUs: `num_gpus_per_node` per node, or all on any."""
    train = config.actor_train
    parts = split_ranks(train.num_processes, config.num_gpus_per_node, num_critics=config.num_critic_processes)
    if len(parts) == 1:
        return ()
    hosts = sorted(nodes, key=lambda each: each[1::-1])
    return tuple(
        LearnerNode(host.node_id, part.total, num_critics=part.critic) for host, part in zip(hosts, parts, strict=False)
    )


def _gpu_nodes(
    numbering: _Numbering, learner: Sequence[int], critic: Sequence[int], common: Sequence[int]
) -> tuple[LearnerNode, ...]:
    return tuple(
        LearnerNode(
            node_id,
            len(numbers),
            tuple(numbering.devices[number][1] for number in numbers),
            len(set(numbers) - set(common)),
            len(set(numbers) & set(critic)),
        )
        for node_id, numbers in numbering.split([*learner, *critic]).items()
    )


def _check_engines(config: RunConfig, numbering: _Numbering, needs_engines: bool) -> Iterator[ConfigIssue]:
    infer, size = config.actor_infer, config.actor_infer.engine.world_size
    if not needs_engines:
        return
    if not numbering.devices:
        yield _explain_none(config, numbering, "actor_infer")
    elif size > numbering.largest:
        yield ConfigIssue(
            "actor_infer.strategy_args.strategy_config.tensor_parallel_size",
            f"an engine of {size} devices fits no node: the largest has {numbering.largest}",
        )
    elif infer.num_replicas > sum(each // size for each in numbering.sizes):
        yield ConfigIssue(
            "actor_infer.num_replicas",
            f"{infer.num_replicas} engine(s) of {size} device(s) need {infer.num_replicas * size}, there are {numbering}",
        )


def _check_learner(config: RunConfig, nodes: Sequence[ClusterNode], numbering: _Numbering) -> Iterator[ConfigIssue]:
    train, per_node = config.actor_train, config.num_gpus_per_node
    total = train.num_processes + config.num_critic_processes
    if train.device == "cuda" and not numbering.devices:
        yield _explain_none(config, numbering, "actor_train")
    elif train.device == "cuda" and train.num_processes > len(numbering.devices):
        yield ConfigIssue(
            "actor_train.num_processes", f"{train.num_processes} process(es) need a device each, there are {numbering}"
        )
    elif train.device == "cpu" and per_node is not None and -(-total // per_node) > len(nodes):
        yield ConfigIssue(
            "actor_train.num_processes",
            f"{total} process(es), {per_node} to a node (num_gpus_per_node), need {-(-total // per_node)} nodes, there are "
            f"{len(nodes)}",
        )


def _check_own(config: RunConfig, numbering: _Numbering, needs_engines: bool) -> Iterator[ConfigIssue]:
    """Yield roles with devices of their own that leave too few."""
    infer, train, total = config.actor_infer, config.actor_train, len(numbering.devices)
    roles = roles_with_own_devices(config)
    count = sum(role.num_devices for role in roles)
    others = max(
        infer.num_replicas * infer.engine.world_size if needs_engines else 0,
        train.num_processes if config.control.learner == "managed" and train.device == "cuda" else 0,
    )
    for role in roles:
        if not total and role.name.startswith(REWARDS):
            yield _explain_none(config, numbering, role.name)
        elif role.per_process > numbering.largest > 0:
            message = f"a replica of {role.per_process} devices fits no node: the largest has {numbering.largest}"
            yield ConfigIssue(f"{role.name}.strategy_args.strategy_config.tensor_parallel_size", message)
    if total >= others and count + others > total > 0:
        yield ConfigIssue(
            f"{roles[0].name}.{roles[0].count_key}",
            f"{', '.join(role.name for role in roles)} need {count} GPU(s) of their own, beside {others} of engines and "
            f"learner; there are {numbering}",
        )
    for role in roles:
        others_devices = {number for path, each in role_mappings(config) if path != role.name for number in each or ()}
        if role.mapping is not None and len(role.mapping) != role.num_devices:
            yield ConfigIssue(
                f"{role.name}.device_mapping",
                f"{len(role.mapping)} device(s) disagree with {role.count_key} {role.num_devices}, of one device each",
            )
        elif shared := sorted(others_devices.intersection(role.mapping or ())):
            yield ConfigIssue(
                f"{role.name}.device_mapping",
                f"device {shared[0]} has another role, and {role.name} shares none of its own",
            )


def _explain_none(config: RunConfig, numbering: _Numbering, role: str) -> ConfigIssue:
    if not numbering.largest_node:
        return ConfigIssue(f"{role}.device", "no NVIDIA GPU found: take cpu")
    largest = numbering.largest_node
    message = f"no node has {config.num_gpus_per_node} GPUs, the largest has {largest}: take at most {largest}"
    return ConfigIssue("num_gpus_per_node", message)


def _check_mappings(config: RunConfig, numbering: _Numbering, needs_engines: bool) -> Iterator[ConfigIssue]:
    """Yield mappings with missing devices."""
    total, is_managed = len(numbering.devices), config.control.learner == "managed"
    for path, mapping in role_mappings(config):
        is_placed = path.startswith(REWARDS) or (needs_engines if path == "actor_infer" else is_managed)
        if mapping is None or not is_placed:
            continue
        if mapping[-1] >= total > 0:
            yield ConfigIssue(
                f"{path}.device_mapping",
                f"device {mapping[-1]} does not exist: there are {numbering}, numbered from 0 to {total - 1}",
            )
