# pyright: basic
"""Serve's choice of a replica: the one that the call names, and none that its caller knows to sleep."""

import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class AwakeReplicaRouter(RequestRouter):
    """Router to the replica `replica_id` of the call, if it runs; else to the less busy of two random ones, of those not
    in the call's argument `asleep` if there are any.

    A call gets the replica that was chosen for it: in Serve's default order of arrival, it could get another call's.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        arguments = pending_request.kwargs if pending_request else {}
        asleep, replica_id = arguments.get("asleep", ()), arguments.get("replica_id", "")
        awake = [each for each in candidate_replicas if each.replica_id.unique_id not in asleep]
        candidates = awake or candidate_replicas
        named = [each for each in candidates if each.replica_id.unique_id == replica_id] if replica_id else []
        others = random.sample(candidates, min(2, len(candidates)))
        return [named, others] if named else [others]


def running_replicas(handle: Any) -> list[str]:
    """Return the ids of the replicas that an initialized handle, routed in this event loop, knows to run."""
    router = handle._router._asyncio_router.request_router  # Serve tells them to routers alone
    return [each.unique_id for each in router.curr_replicas] if router is not None else []
