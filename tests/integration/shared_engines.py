"""Two real engines on logical GPUs, one of which the learner has too; the learner's turns and weights over a real Redis."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import redis
import torch
from ray import serve

from offbeat.services.device_turns import LearnerTurns
from offbeat.services.devices import EngineDevices
from offbeat.services.generation.app import build
from offbeat.services.generation.client import DEPLOYMENT
from offbeat.services.generation.config import EngineStrategy, GenerationConfig, VllmConfig, app_name
from offbeat.services.generation.replica import ReplicaStatus
from offbeat.services.keys import RunKeys
from offbeat.services.messages.types import Trajectory
from offbeat.services.redis.lease import LearnerLease
from offbeat.services.weights.config import WeightsConfig
from offbeat.services.weights.publisher import RedisWeightPublisher
from offbeat.services.weights.transports.factory import cleanup
from tests.integration.policy_weights import named_tensors, random_policy
from tests.services.weights.publishing import give_lease
from tests.waiting import PATIENCE_S

LEASE_S = 10.0
CONFIG = GenerationConfig(
    device="cuda",
    num_replicas=2,
    cpus_per_replica=0.2,
    kv_cache_gib=0.05,
    on_weight_update="recompute",
    strategy_args=EngineStrategy(strategy_name="hf_infer", strategy_config=VllmConfig(enable_sleep_mode=True)),
)
"""`hf_infer` computes on the CPU, whatever devices it is given."""


class SharedEngines:
    """The engines of a run and its learner's end of them."""

    def __init__(self, run_id: str, server: redis.Redis, lease: LearnerLease, folder: Path, output_dir: Path) -> None:
        self._run_id = run_id
        self._redis = server
        self.epoch = lease.epoch
        give_lease(server, run_id, lease.epoch)
        self.turns = LearnerTurns(server, run_id, "", lease.epoch, LEASE_S)
        self.policies = [random_policy(folder, seed) for seed in range(4)]
        self._publisher = RedisWeightPublisher(server, run_id, WeightsConfig(), lease.epoch, output_dir)

    def publish(self, version: int) -> None:
        self._publisher.publish(version, version, named_tensors(self.policies[version]))
        self._publisher.flush()

    @property
    def sleeping(self) -> dict[str, str]:
        """Turn in which each engine on shared devices sleeps; empty if it is awake."""
        states = self._redis.hgetall(RunKeys(self._run_id).sharing_engines)
        return {name.decode(): state.decode().partition(" ")[2] for name, state in states.items()}  # type: ignore[union-attr]

    async def status(self) -> dict[str, ReplicaStatus]:
        handle = serve.get_deployment_handle(DEPLOYMENT, app_name(self._run_id))
        statuses = await handle.broadcast("statuses").results_async()
        return {status["replica_id"]: status for replica in statuses for status in replica.values()}

    async def begin(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        has_begun = await asyncio.to_thread(self.turns.begin, lambda: time.monotonic() > deadline)
        assert has_begun, f"awake: {self.sleeping}, {await self.status()}"

    def mismatch(self, trajectory: Trajectory) -> float:
        """Return the largest error of the logprobs under the weights of each token's version."""
        (segment,) = trajectory.segments
        tokens = torch.tensor(segment.tokens).long()
        worst = 0.0
        for start, end, version in segment.versions:
            with torch.no_grad():
                logits = self.policies[version](tokens[None, :end]).logits[0, start - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, tokens[start:end, None])[:, 0]
            worst = max(worst, float((expected - torch.tensor(segment.logprobs[start:end])).abs().max()))
        return worst


@contextmanager
def shared_engines(
    run_id: str, server: redis.Redis, url: str, folder: Path, output_dir: Path
) -> Iterator[SharedEngines]:
    """Devices 0 and 1, each of an engine; the learner has 0."""
    (node,) = ray.nodes()
    slots = (EngineDevices(node["NodeID"], (0,), is_shared=True), EngineDevices(node["NodeID"], (1,)))
    with LearnerLease(server, run_id, "learner", LEASE_S) as lease:
        lease.acquire(wait_s=30)
        engines = SharedEngines(run_id, server, lease, folder, output_dir)
        engines.publish(0)
        app: Any = build(
            run_id,
            CONFIG,
            WeightsConfig(),
            model=folder,
            sequence_length=512,
            redis_url=url,
            output_dir=output_dir,
            seed=1,
            slots=slots,
        )
        try:
            serve.run(app, name=app_name(run_id), route_prefix=None)
            yield engines
        finally:
            cleanup(run_id, WeightsConfig(), output_dir)
