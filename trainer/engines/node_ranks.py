"""Ranks of a learner's world, node by node: on each node the policy's, then those of a critic with processes of its own.

Invariant: rank 0 is the policy's.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

RANKS_PER_NODE = "OFFBEAT_RANKS_PER_NODE"
"""Environment variable: ranks by node, rank 0's first (`2,2`; with a critic's `2+1,0+1`)."""


class NodeRanks(NamedTuple):
    policy: int
    critic: int = 0

    @property
    def total(self) -> int:
        return self.policy + self.critic


def encode_ranks(nodes: Iterable[NodeRanks]) -> str:
    return ",".join(f"{node.policy}+{node.critic}" if node.critic else str(node.policy) for node in nodes)


def decode_ranks(text: str) -> tuple[NodeRanks, ...]:
    return tuple(NodeRanks(*map(int, node.split("+"))) for node in text.split(",") if node)


def critic_ranks(nodes: Sequence[NodeRanks]) -> tuple[int, ...]:
    """Return the world's ranks that have the critic."""
    ranks: list[int] = []
    first = 0
    for node in nodes:
        ranks += range(first + node.policy, first + node.total)
        first += node.total
    return tuple(ranks)


def split_ranks(
    num_processes: int,
    per_node: int | None,
    mapping: Sequence[int] | None = None,
    num_critics: int = 0,
    critic_mapping: Sequence[int] | None = None,
) -> tuple[NodeRanks, ...]:
    """Return the ranks by node, from `num_gpus_per_node` and devices; without devices, the last ranks are the critic's."""
    if per_node is None:
        return (NodeRanks(num_processes, num_critics),)
    if mapping is None or len(mapping) != num_processes or len(critic_mapping or ()) != num_critics:
        return _fill_nodes(num_processes, num_critics, per_node)
    policy, critic = ([device // per_node for device in devices or ()] for devices in (mapping, critic_mapping))
    nodes = [*sorted(set(policy)), *sorted(set(critic) - set(policy))]
    return tuple(NodeRanks(policy.count(node), critic.count(node)) for node in nodes)


def _fill_nodes(num_processes: int, num_critics: int, per_node: int) -> tuple[NodeRanks, ...]:
    total = num_processes + num_critics
    sizes = [min(per_node, total - start) for start in range(0, total, per_node)]
    policies = [max(0, min(size, num_processes - node * per_node)) for node, size in enumerate(sizes)]
    return tuple(NodeRanks(policy, size - policy) for size, policy in zip(sizes, policies, strict=True))
