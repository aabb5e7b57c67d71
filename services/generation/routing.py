"""Replicas of episodes: a turn goes where the keys and values of its prompt are.

Invariants: an episode stays at its replica while that runs and is awake. Live episodes are spread evenly, except that the
members of a group share a replica, as their first prompts are alike, within `MIN_SLACK` and `SLACK` of the least busy.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.services.messages.types import GenerateRequest

MIN_SLACK = 4
"""Episodes that a group's replica may have more than the least busy one."""
AVOIDED_S = 30.0
"""By then Serve has replaced a replica that hangs."""
SLACK = 0.25
"""The same, as a share of the least busy replica's."""


class ReplicaRoute(NamedTuple):
    replica_id: str
    """Empty: any."""
    requests: Sequence[GenerateRequest]


class Unrouted:
    """Routing of a client whose requests all go one way."""

    def route(self, requests: Sequence[GenerateRequest]) -> list[ReplicaRoute]:
        return [ReplicaRoute("", requests)]

    def forget(self, episode: str) -> None:
        del episode

    def avoid(self, replica_id: str) -> None:
        del replica_id


class _Assignment(NamedTuple):
    replica_id: str
    group: str


@dataclass(slots=True)
class _GroupMembers:
    replica_id: str
    count: int = 0


class ReplicaAssignments:
    """Live episodes of one client by replica."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._avoided: dict[str, float] = {}
        """By replica id, when it may get requests again."""
        self._assigned: dict[str, _Assignment] = {}
        """By episode, or by request without one."""
        self._groups: dict[str, _GroupMembers] = {}
        self._load = Counter[str]()

    def __len__(self) -> int:
        return len(self._assigned)

    def split(self, requests: Sequence[GenerateRequest], replicas: Sequence[str]) -> list[ReplicaRoute]:
        """Split requests by replica. replicas: ids of those that run and are awake; with fewer than two, all go together."""
        if len(replicas) < 2:
            return [ReplicaRoute("", requests)]
        now = self._clock()
        self._avoided = {each: until for each, until in self._avoided.items() if until > now}
        replicas = [each for each in replicas if each not in self._avoided] or replicas
        parts: dict[str, list[GenerateRequest]] = {}
        for request in requests:
            parts.setdefault(self._replica(request, replicas), []).append(request)
        return [ReplicaRoute(replica_id, part) for replica_id, part in parts.items()]

    def forget(self, episode: str) -> None:
        """Release an episode that is over, or a request without one; ignore unknown ones."""
        assigned = self._assigned.pop(episode, None)
        if assigned is None:
            return
        self._load[assigned.replica_id] -= 1
        if members := self._groups.get(assigned.group):
            members.count -= 1
            if not members.count:
                del self._groups[assigned.group]

    def avoid(self, replica_id: str) -> None:
        """Leave a replica out for `AVOIDED_S`, if there are others."""
        self._avoided[replica_id] = self._clock() + AVOIDED_S

    def _replica(self, request: GenerateRequest, replicas: Sequence[str]) -> str:
        name = request.episode or request.request_id
        assigned = self._assigned.get(name)
        if assigned is not None and assigned.replica_id in replicas:
            return assigned.replica_id
        self.forget(name)
        chosen = self._choose(request.group, replicas)
        self._assigned[name] = _Assignment(chosen, request.group)
        self._load[chosen] += 1
        if request.group:
            self._groups.setdefault(request.group, _GroupMembers(chosen)).count += 1
        return chosen

    def _choose(self, group: str, replicas: Sequence[str]) -> str:
        # in random order: many workers, each with few episodes, would all begin with the same one
        least = min(random.sample(replicas, len(replicas)), key=self._load.__getitem__)
        members = self._groups.get(group)
        if members is None:
            return least
        if members.replica_id not in replicas:
            members.replica_id = least
        limit = self._load[least] + max(MIN_SLACK, SLACK * self._load[least])
        return members.replica_id if self._load[members.replica_id] < limit else least
