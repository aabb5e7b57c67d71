"""Assignments of episodes to replicas."""

from collections import Counter

import pytest

from offbeat.services.generation.routing import AVOIDED_S, ReplicaAssignments
from offbeat.services.messages.types import GenerateRequest, Sampling


def request(episode: str, group: str = "", turn: int = 0) -> GenerateRequest:
    return GenerateRequest(f"{episode}/{turn}", (1,), Sampling(), episode=episode, group=group)


def place(assignments: ReplicaAssignments, replicas: list[str], *requests: GenerateRequest) -> dict[str, str]:
    """Return the replica of each request."""
    routes = assignments.split(requests, replicas)
    assert sum(len(route.requests) for route in routes) == len(requests)
    return {each.request_id: route.replica_id for route in routes for each in route.requests}


def load(placed: dict[str, str]) -> list[int]:
    return sorted(Counter(placed.values()).values())


@pytest.mark.parametrize("replicas", [[], ["a"]])
def test_with_one_replica_all_requests_go_together(replicas: list[str]) -> None:
    assignments = ReplicaAssignments()
    requests = [request(f"{i}") for i in range(5)]
    assert assignments.split(requests, replicas) == [("", requests)]
    assert len(assignments) == 0


def test_an_episode_stays_and_episodes_are_spread_evenly() -> None:
    assignments, replicas = ReplicaAssignments(), ["a", "b", "c"]
    first = place(assignments, replicas, *(request(f"{i}") for i in range(30)))
    assert load(first) == [10, 10, 10]
    for turn in range(1, 4):
        later = place(assignments, replicas, *(request(f"{i}", turn=turn) for i in reversed(range(30))))
        assert {name.partition("/")[0]: replica for name, replica in later.items()} == {
            name.partition("/")[0]: replica for name, replica in first.items()
        }


def test_a_group_shares_a_replica_and_large_ones_are_split() -> None:
    assignments, replicas = ReplicaAssignments(), ["a", "b"]
    groups = [[request(f"{g}-{i}", group=f"g{g}") for i in range(4)] for g in range(8)]
    placed = [place(assignments, replicas, *group) for group in groups]
    assert [len(set(each.values())) for each in placed] == [1] * 8
    assert load({name: replica for each in placed for name, replica in each.items()}) == [16, 16]

    one = place(ReplicaAssignments(), replicas, *(request(f"{i}", group="only") for i in range(64)))
    assert load(one)[0] >= 24


def test_a_replica_that_joins_gets_new_episodes_until_it_has_its_share() -> None:
    assignments = ReplicaAssignments()
    place(assignments, ["a", "b"], *(request(f"{i}") for i in range(20)))
    joined = place(assignments, ["a", "b", "c"], *(request(f"n{i}") for i in range(10)))
    assert set(joined.values()) == {"c"}
    for i in range(20):
        assignments.forget(f"{i}")
    assert load(place(assignments, ["a", "b", "c"], *(request(f"m{i}") for i in range(20)))) == [10, 10]


def test_episodes_of_a_replica_that_left_go_to_others_once() -> None:
    assignments = ReplicaAssignments()
    first = place(assignments, ["a", "b", "c"], *(request(f"{i}", group=f"g{i // 3}") for i in range(30)))
    gone = [name for name, replica in first.items() if replica == "a"]
    second = place(assignments, ["b", "c"], *(request(f"{i}", group=f"g{i // 3}") for i in range(30)))
    assert {name: replica for name, replica in second.items() if name not in gone} == {
        name: replica for name, replica in first.items() if name not in gone
    }
    back = place(assignments, ["a", "b", "c"], *(request(f"{i}", group=f"g{i // 3}") for i in range(30)))
    assert back == second


def test_a_replica_whose_call_failed_is_left_out_for_a_while() -> None:
    now = 0.0
    assignments, replicas = ReplicaAssignments(lambda: now), ["a", "b", "c"]
    place(assignments, replicas, *(request(f"{i}") for i in range(9)))
    assignments.avoid("a")
    assert set(place(assignments, replicas, *(request(f"{i}") for i in range(9))).values()) == {"b", "c"}
    for each in "bc":
        assignments.avoid(each)
    assert "a" in place(assignments, replicas, *(request(f"n{i}") for i in range(9))).values(), "all are left out"
    assignments.avoid("a")
    now = AVOIDED_S + 1
    assert len(set(place(assignments, replicas, *(request(f"m{i}") for i in range(30))).values())) == 3


def test_what_is_over_is_forgotten() -> None:
    assignments = ReplicaAssignments()
    single = GenerateRequest("single", (1,), Sampling(), group="g")
    place(assignments, ["a", "b"], request("one", "g"), single)
    assert len(assignments) == 2
    for name in ("one", "single", "unknown", "one"):
        assignments.forget(name)
    assert not {**assignments._assigned, **assignments._groups}
    assert not any(assignments._load.values())
