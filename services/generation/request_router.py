"""Serve's choice of a replica, which leaves out those that the caller knows to sleep."""

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class AwakeReplicaRouter(RequestRouter):
    """Router that takes the less busy of two random replicas, of those not in the call's argument `asleep` if there are any.

    A call gets the replica that was chosen for it: in Serve's default order of arrival, it could get another call's.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        asleep = pending_request.kwargs.get("asleep", ()) if pending_request else ()
        awake = [each for each in candidate_replicas if each.replica_id.unique_id not in asleep]
        candidates = awake or candidate_replicas
        return [random.sample(candidates, min(2, len(candidates)))]
