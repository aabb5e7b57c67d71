"""Env workers as Ray actors with a real Redis and a replica on Ray Serve that answers without an engine.

One Ray; the tests run in order, and each plays a run of its own.
"""

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import redis
from ray import serve
from ray.exceptions import RayActorError

from offbeat.envs.frozen_lake import WORDS
from offbeat.services.buffer.admin import configure_buffer
from offbeat.services.buffer.api import BufferLimits, Counters
from offbeat.services.buffer.learner_client import RedisLearnerBuffer
from offbeat.services.chat.append_only import load_chat_format
from offbeat.services.generation.config import app_name
from offbeat.services.keys import RunKeys
from offbeat.services.messages.types import Group, Trajectory
from offbeat.services.rollout.actor import build, stop_worker, worker_name
from offbeat.services.rollout.config import CustomEnv, RolloutConfig, WorkerSettings
from offbeat.services.rollout.tasks import train_task
from offbeat.services.telemetry import RedisMetrics, merge_all
from offbeat.trainer.config.tiny_policy import TinyPolicyConfig
from offbeat.trainer.models.tiny import write_tiny_policy
from tests.fakes_rollout import worker_settings
from tests.integration.rollout_replica import build_walker
from tests.integration.shared_engines import SharedEngines, shared_engines
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("ray_cluster"),
]

NAMESPACE = "rollout-test"
GROUP_SIZE = 4
RECOVERY_S = 240.0
"""Longest start of a worker's process, and what is then trained, beside the tests of the mesh."""
WORKER_TIMEOUT_S = 60.0
"""Of workers that live: none loses its episodes while the machine stands still."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    write_tiny_policy(path, TinyPolicyConfig(), WORDS)
    return path


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("", "MAX_"):  # or a call leaves its replica because that stood still for 0.4 s
            patch.setenv(f"RAY_SERVE_{name}QUEUE_LENGTH_RESPONSE_DEADLINE_S", "30")
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=2,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir="/tmp/offbeat-rp",
        )
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


class Run:
    """A run's buffer, its learner and its only env worker."""

    def __init__(self, run_id: str, server: redis.Redis, settings: WorkerSettings, total_groups: int) -> None:
        self.run_id = run_id
        self.settings = settings
        self.redis = server
        self.keys = RunKeys(run_id)
        configure_buffer(
            server, run_id, BufferLimits(GROUP_SIZE, 0, 4, 1e6, 6, total_groups, 3, settings.worker_timeout_s, "drop")
        )
        self.learner = RedisLearnerBuffer(server, run_id, int(server.incr(self.keys.epoch)))  # type: ignore[arg-type]
        self.groups: list[Group] = []

    def publish(self) -> None:
        """What the broker does to the buffer."""
        self.redis.hset(self.keys.progress, mapping={"version": 0, "step": 0})
        self.redis.xadd(self.keys.doorbell, {"e": "publish"})

    def start_worker(self) -> Any:
        return build(0, self.settings, namespace=NAMESPACE)

    def serve_generation(self, delay_s: float = 0.005, num_replicas: int = 1) -> Any:
        chat = load_chat_format(self.settings.model_folder)
        words = tuple(chat.encode(word)[0] for word in ("Left", "Down", "Right", "Up"))
        app = build_walker(words, chat.end_id, delay_s=delay_s, num_replicas=num_replicas)
        return serve.run(app, name=app_name(self.run_id), route_prefix=None)

    async def pid(self) -> int:
        """Of the worker that answers."""
        alive: dict[str, Any] | None = None

        async def answers() -> bool:
            nonlocal alive
            try:
                actor = ray.get_actor(worker_name(self.run_id, 0), namespace=NAMESPACE)
                alive = await asyncio.wait_for(asyncio.shield(actor.alive.remote()), 5)
            except (RayActorError, ValueError, TimeoutError):
                return False
            return bool(alive and alive["ready"])

        await wait_until(answers, RECOVERY_S)
        assert alive
        return int(alive["pid"])

    async def train(self, count: int) -> None:
        """Take and acknowledge `count` more groups."""
        wanted = len(self.groups) + count
        async with asyncio.timeout(RECOVERY_S):
            while len(self.groups) < wanted:
                group = await asyncio.to_thread(self.learner.take, 0.5)
                if group:
                    self.groups.append(group)
                    self.learner.ack([group.entry_id], 1)

    def counters(self) -> Counters:
        return self.learner.counters()


@pytest.fixture
def begin(folder: Path, tmp_path: Path, redis_url: str):
    @asynccontextmanager
    async def start(run_id: str, total_groups: int, **changes: Any) -> AsyncIterator[Run]:
        rollout = RolloutConfig(max_env_num_per_worker=16, cpus_per_worker=0.2)
        settings = worker_settings(
            folder,
            run_id=run_id,
            generation_app=app_name(run_id),
            redis_url=redis_url,
            output_dir=tmp_path,
            rollout=rollout,
            **{"worker_timeout_s": WORKER_TIMEOUT_S, **changes},
        )
        with redis.Redis.from_url(redis_url) as server:
            run = Run(run_id, server, settings, total_groups)
            try:
                yield run
            finally:
                await stop_worker(run_id, 0, namespace=NAMESPACE, grace_s=3.0)
                serve.delete(app_name(run_id))

    return start


def assert_whole(run: Run, total: int) -> None:
    """Every admitted group was trained once, with the task that its number fixes and equal first prompts."""
    counters = run.counters()
    assert (counters.admitted, counters.trained, counters.in_flight) == (total, total, 0)
    assert (counters.failed, counters.dropped) == ({}, {})
    assert sorted(group.number for group in run.groups) == list(range(total))
    for group in run.groups:
        tag, seed = train_task(run.settings, run.settings.seed, group.number)
        assert {(t.tag, t.seed) for t in group.trajectories} == {(tag, seed)}
        assert sorted(t.index for t in group.trajectories) == list(range(GROUP_SIZE))
        prompts = {tuple(t.segments[0].tokens[: t.turns[0].start].tolist()) for t in group.trajectories}
        assert len(prompts) == 1


async def test_a_worker_that_starts_first_waits_for_generation(begin):
    async with begin("pool-order", total_groups=12) as run:
        run.publish()
        actor = run.start_worker()
        assert (await actor.alive.remote())["ready"] is False
        run.serve_generation()
        assert run.start_worker()._actor_id == actor._actor_id
        await run.train(12)
        assert_whole(run, 12)
        await wait_until(lambda: count_episodes(run) == 12 * GROUP_SIZE)
        seen = merge_all(r.values for _, r in RedisMetrics(run.redis, run.run_id).read())
        assert seen["playing"].kind == "mean"


def count_episodes(run: Run) -> float:
    records = [record for _, record in RedisMetrics(run.redis, run.run_id).read()]
    return sum(record.values["episodes"].total for record in records if "episodes" in record.values)


async def test_a_killed_worker_is_replaced_and_every_group_is_still_trained_once(begin):
    async with begin("pool-worker", total_groups=30, worker_timeout_s=4.0) as run:
        run.serve_generation()
        run.start_worker()
        run.publish()
        await run.train(6)
        first = await run.pid()
        os.kill(first, signal.SIGKILL)
        await run.train(12)
        second = await run.pid()
        assert second != first
        os.kill(second, signal.SIGKILL)
        await run.train(12)
        assert_whole(run, 30)
        assert any(t.attempt > 0 for group in run.groups for t in group.trajectories)


async def test_an_episode_stays_at_its_replica(begin):
    """With both replicas at work; one of them is killed, whose episodes continue at the other one."""
    async with begin("pool-routing", total_groups=24) as run:
        handle = run.serve_generation(num_replicas=2)
        run.start_worker()
        run.publish()
        await run.train(12)
        # the first episodes begin before the worker knows both
        groups = [group for group in run.groups if group.number >= 16 // GROUP_SIZE]
        played = [replicas_of(trajectory) for group in groups for trajectory in group.trajectories]
        assert {len(replicas) for replicas in played} == {1}
        counts = Counter(pid for (pid,) in played)
        assert len(counts) == 2
        os.kill(await handle.pid.remote(), signal.SIGKILL)
        await run.train(12)
        assert_whole(run, 24)


def replicas_of(trajectory: Trajectory) -> set[int]:
    """Return the processes that sampled an episode's turns."""
    (segment,) = trajectory.segments
    return {int(-segment.logprobs[turn.start]) for turn in trajectory.turns}


async def test_a_killed_replica_costs_no_episode(begin):
    async with begin("pool-replica", total_groups=20) as run:
        handle = run.serve_generation(delay_s=0.05)
        run.start_worker()
        run.publish()
        await run.train(3)
        os.kill(await handle.pid.remote(), signal.SIGKILL)
        await run.train(17)
        assert_whole(run, 20)
        assert {t.attempt for group in run.groups for t in group.trajectories} == {0}


async def test_engines_on_the_learners_devices_leave_routing_in_its_turns(begin, redis_url: str):
    """One of two engines sleeps in each turn, while the other one samples; it returns with the weights of that turn."""
    lake = CustomEnv(env_type="frozen_lake", max_steps=3, max_tokens_per_step=40, execution="inline")
    async with begin("pool-turns", total_groups=24, custom_envs={"Lake": lake}, request_timeout_s=60.0) as run:
        folder, output_dir = run.settings.model_folder, run.settings.output_dir
        with shared_engines(run.run_id, run.redis, redis_url, folder, output_dir) as engines:
            run.learner = RedisLearnerBuffer(run.redis, run.run_id, engines.epoch)
            run.start_worker()
            await run.train(3)
            (shared,) = engines.sleeping
            (other,) = set(await engines.status()) - {shared}
            for version in (1, 2, 3):
                await engines.begin()
                assert engines.sleeping[shared]
                await run.train(3)
                for _ in range(5):
                    statuses = await engines.status()
                    assert (statuses[shared]["running"], statuses[shared]["version"]) == (0, version - 1)
                engines.publish(version)
                await wait_until(lambda v=version: serves(engines, other, v))
                engines.turns.end()
                await wait_until(lambda: samples(engines, shared))
                assert (await engines.status())[shared]["version"] == version
            await run.train(12)
        assert_whole(run, 24)
        trajectories = [trajectory for group in run.groups for trajectory in group.trajectories]
        assert {trajectory.attempt for trajectory in trajectories} == {0}
        assert max(map(engines.mismatch, trajectories)) < 5e-5
        logs = {path.stem: path.read_text() for path in (output_dir / "logs").glob("generation-*.log")}
        states = {name: re.findall(r"asleep|awake", log) for name, log in logs.items()}
        assert states == {f"generation-{shared}": ["asleep", "awake"] * 3, f"generation-{other}": []}


async def serves(engines: SharedEngines, replica_id: str, version: int) -> bool:
    return (await engines.status())[replica_id]["version"] == version


async def samples(engines: SharedEngines, replica_id: str) -> bool:
    return (await engines.status())[replica_id]["running"] > 0


async def stop_by_itself(run: Run) -> None:
    actor = ray.get_actor(worker_name(run.run_id, 0), namespace=NAMESPACE)
    with suppress(RayActorError):
        await asyncio.wait_for(actor.stop.remote(), 60)


async def stop_from_outside(run: Run) -> None:
    await stop_worker(run.run_id, 0, namespace=NAMESPACE, grace_s=60.0)


@pytest.mark.parametrize("stop", [stop_by_itself, stop_from_outside])
async def test_a_stopped_worker_gives_back_what_it_played_and_stays_away(begin, stop: Callable[[Run], Awaitable[None]]):
    async with begin(f"pool-{stop.__name__}", total_groups=8) as run:
        run.serve_generation(delay_s=1000.0)
        run.start_worker()
        run.publish()
        pid = await run.pid()
        claims = f"{run.keys.key('buffer')}:claims:{worker_name(run.run_id, 0)}"
        await wait_until(lambda: run.redis.hlen(claims) == 16)
        await stop(run)
        await wait_until(lambda: not psutil.pid_exists(pid))
        await wait_until(lambda: not is_known(run))
        assert not run.redis.exists(claims)
        counters = run.counters()
        assert counters.admitted == counters.in_flight > 0


def is_known(run: Run) -> bool:
    try:
        ray.get_actor(worker_name(run.run_id, 0), namespace=NAMESPACE)
    except ValueError:
        return False
    return True
