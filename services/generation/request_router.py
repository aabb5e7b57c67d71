# pyright: basic
"""Serve's choice of a replica: the one that the call names, and none that its caller knows to sleep."""

import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class AwakeReplicaRouter(RequestRouter):
    """Router to the replica that the call's `session_id` names, if it runs; else to the less busy of two random ones, of
    those not in the call's argument `asleep` if there are any.

    A call gets the replica that was chosen for it: in Serve's default order of arrival, it could get another call's.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        asleep = pending_request.kwargs.get("asleep", ()) if pending_request else ()
        replica_id = pending_request.metadata.session_id if pending_request else ""
        awake = [each for each in candidate_replicas if each.replica_id.unique_id not in asleep]
        candidates = awake or candidate_replicas
        named = [each for each in candidates if each.replica_id.unique_id == replica_id] if replica_id else []
        others = random.sample(candidates, min(2, len(candidates)))
        # a busy replica that answers no question about its queue in 0.1 s is asked again, for longer each time
        return [named, named, named, others] if named else [others]


def running_replicas(handle: Any) -> list[str]:
    """Return the ids of the replicas that an initialized handle, routed in this event loop, knows to run."""
    router = handle._router._asyncio_router.request_router  # Serve passes them to routers only
    return [each.unique_id for each in router.curr_replicas] if router is not None else []
