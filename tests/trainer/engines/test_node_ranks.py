import pytest

from offbeat.trainer.engines.node_ranks import NodeRanks, critic_ranks, decode_ranks, encode_ranks, split_ranks


@pytest.mark.parametrize(
    ("num_processes", "per_node", "mapping", "sizes"),
    [
        (4, None, None, (4,)),
        (4, 2, None, (2, 2)),
        (5, 2, None, (2, 2, 1)),
        (2, 2, (1, 2), (1, 1)),
        (3, 4, (2, 3, 8), (2, 1)),
        (2, 4, (2, 3, 8), (2,)),
    ],
)
def test_ranks_are_split_by_node(
    num_processes: int, per_node: int | None, mapping: tuple[int, ...] | None, sizes: tuple[int, ...]
) -> None:
    """The last case is `--nproc`, which overrides a mapping."""
    assert split_ranks(num_processes, per_node, mapping) == tuple(NodeRanks(size) for size in sizes)


@pytest.mark.parametrize(
    ("policy", "critic", "nodes", "ranks"),
    [
        ((0, 1), (2, 3), "2+2", (2, 3)),
        ((0, 4), (1, 5), "1+1,1+1", (1, 3)),
        ((4, 5), (0, 6), "2+1,0+1", (2, 3)),
    ],
)
def test_a_critic_has_the_ranks_of_its_devices(
    policy: tuple[int, ...], critic: tuple[int, ...], nodes: str, ranks: tuple[int, ...]
) -> None:
    """Rank 0 is always the policy's, also where the critic has the first node alone."""
    split = split_ranks(len(policy), 4, policy, len(critic), critic)
    assert encode_ranks(split) == nodes
    assert decode_ranks(nodes) == split
    assert critic_ranks(split) == ranks


@pytest.mark.parametrize(
    ("num_processes", "num_critics", "per_node", "nodes"),
    [(1, 1, None, "1+1"), (1, 1, 1, "1,0+1"), (3, 2, 2, "2,1+1,0+1"), (2, 2, 2, "2,0+2")],
)
def test_without_devices_the_critic_has_the_last_ranks(
    num_processes: int, num_critics: int, per_node: int | None, nodes: str
) -> None:
    split = split_ranks(num_processes, per_node, num_critics=num_critics)
    assert encode_ranks(split) == nodes
    first = num_processes
    assert critic_ranks(split) == tuple(range(first, first + num_critics))
