"""A worker whose envs, replicas, buffer or threads fail, and that is stopped."""

import asyncio
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from tokenizers import Tokenizer

from offbeat.services.errors import BufferError, RetryableError
from offbeat.services.messages.codec import decode_trajectory, encode_trajectory
from offbeat.services.messages.types import (
    EpisodeKind,
    EpisodeTask,
    StopReason,
)
from offbeat.services.rollout.config import CustomEnv, RolloutConfig
from offbeat.services.rollout.tasks import train_task
from offbeat.services.rollout.worker import WorkerEnd
from offbeat.services.telemetry import merge_all
from tests.fakes_rollout import (
    CountingEnv,
    FakeGeneration,
    train_episode,
    worker_settings,
)
from tests.services.rollout.worker_bench import custom, group, walker
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

RAISES_WHEN_MADE = {"how": "raise", "when": "make"}


async def test_one_bad_env_harms_no_other_episode(bench):
    envs = {"Bad": custom("BadEnv", env_config={"how": "raise"}), "Good": custom("CountingEnv")}
    async with bench(*group(0), *group(1), custom_envs=envs) as b:
        await b.until_done(8)
        assert not b.running.done()
    assert [reason for _, reason in b.buffer.failed] == ["step_error"] * 4
    assert {task.number for task, _ in b.buffer.failed} == {0}
    assert {task.number for task in b.buffer.submitted} == {1}


@pytest.mark.parametrize("execution", ["thread", "process"])
async def test_a_hung_env_is_retried_with_the_same_seed(bench, tmp_path: Path, execution: str):
    config = {"how": "hang", "marker": str(tmp_path / "hung")}
    env = custom("BadEnv", execution, env_config=config, step_timeout_s=6.0)
    async with bench(train_episode(0), custom_envs={"Bad": env}) as b:
        b.buffer.retries = True
        await wait_until(lambda: bool(b.buffer.submitted))
    assert b.buffer.failed == [(train_episode(0), "step_timeout")]
    ((task, trajectory),) = b.buffer.submitted.items()
    assert (task.attempt, trajectory.attempt) == (1, 1)
    assert trajectory.seed == train_task(worker_settings(tmp_path, custom_envs={"Bad": env}), 7, 0).seed


class MainThreadEnv(CountingEnv):
    """As an env that installs a signal handler."""

    def __init__(self) -> None:
        super().__init__()
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def task_id(self, seed: int) -> tuple[int, ...]:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        return (seed // 2,)


class LockedTasksEnv(CountingEnv):
    """Reports whether another instance was in `task_id` while this one stepped."""

    inside = threading.Event()

    def task_id(self, seed: int) -> int:
        LockedTasksEnv.inside.set()
        time.sleep(0.02)
        LockedTasksEnv.inside.clear()
        return seed

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        met = LockedTasksEnv.inside.wait(0.2)
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {**info, "met": met}


def evaluation(number: int = 0) -> EpisodeTask:
    return EpisodeTask(EpisodeKind.EVAL, "eval", number, number, 0, 0, sampling_name="greedy")


async def test_evaluation_tasks_are_found_in_a_process_of_the_env(bench):
    """With tasks as any library may name them, each of two seeds."""
    env = CustomEnv(env_type=f"{__name__}:MainThreadEnv", execution="process", max_steps=1)
    async with bench(evaluation(0), evaluation(1), custom_envs={"Main": env}) as b:
        await b.until_done(2)
    assert b.buffer.failed == []
    seeds = sorted(trajectory.seed for trajectory in b.buffer.submitted.values())
    assert seeds[0] // 2 + 1 == seeds[1] // 2


async def test_evaluation_tasks_are_found_within_the_lock_of_a_tag(bench):
    env = CustomEnv(env_type=f"{__name__}:LockedTasksEnv", execution="thread", max_steps=3, use_thread_lock=True)
    async with bench(*group(0, 2), evaluation(), custom_envs={"Locked": env}) as b:
        await b.until_done(3)
    assert {each.metrics["met"] for each in b.buffer.submitted.values()} == {0.0}


@pytest.mark.parametrize(("execution", "timeout_s"), [("thread", 4.0), ("process", 25.0)])
async def test_a_hanging_task_id_fails_its_evaluation_with_the_tag(
    bench, tmp_path: Path, execution: str, timeout_s: float
):
    """timeout_s: in a process with the time of its imports, of which a busy machine takes seconds."""
    env = custom("SlowTasksEnv", execution, env_config={"marker": str(tmp_path / "m")}, reset_timeout_s=timeout_s)
    async with bench(evaluation(), custom_envs={"Slow": env}) as b:
        await wait_until(lambda: b.worker._waits.report()["evaluations"] == {"eval": {"place": [1, ANY]}})
        await b.until_done(1)
        assert b.buffer.failed == [(evaluation(), "task_id_timeout")]
        assert b.worker._outcomes.report()["key"] == "custom_envs.Slow"


async def test_an_env_that_can_not_be_made_fails_its_evaluation_with_the_tag(bench):
    async with bench(evaluation(), custom_envs={"Bad": custom("BadEnv", env_config=RAISES_WHEN_MADE)}) as b:
        await b.until_done(1)
        assert b.buffer.failed == [(evaluation(), "make_error")]
        assert b.worker._outcomes.report()["key"] == "custom_envs.Bad"


async def test_a_crashed_env_process_fails_its_episode_alone(bench, tmp_path: Path):
    env = custom("BadEnv", "process", env_config={"how": "crash", "marker": str(tmp_path / "crashed")})
    async with bench(*group(0, 3), custom_envs={"Bad": env}) as b:
        await wait_until(lambda: len(b.buffer.submitted) + len(b.buffer.failed) == 3)
    assert [reason for _, reason in b.buffer.failed] == ["env_crashed"]
    assert len(b.buffer.submitted) == 2


@pytest.mark.parametrize(
    ("execution", "how", "reason"),
    [("inline", "raise", "step_error"), ("inline", "surrogate", "step_error"), ("process", "crash", "env_crashed")],
)
async def test_an_error_of_the_env_ends_the_episode_with_the_rules_reward(bench, execution: str, how: str, reason: str):
    """The rewards and tokens of earlier steps stay; a failing episode is trained, not repeated until it passes."""
    rule = {"reward": -2.0, "reasons": (reason,)}
    env = custom("BadEnv", execution, env_config={"how": how}, on_env_error=rule)
    async with bench(*group(0, 2), custom_envs={"Bad": env}) as b:
        await b.until_done(2)
    assert not b.buffer.failed
    for trajectory in b.buffer.submitted.values():
        assert (trajectory.stop_reason, [turn.reward for turn in trajectory.turns]) == (StopReason.ERROR, [0.5, -2.0])
        assert all(trajectory.segments[0].loss_mask[turn.start : turn.end].all() for turn in trajectory.turns)
        assert (trajectory.metrics["ended_by_error"], trajectory.metrics["success"]) == (1.0, 0.0)
        assert trajectory.error.startswith(f"{reason}: ")
        assert decode_trajectory(encode_trajectory(trajectory)).error == trajectory.error
    counts = merge_all(record.values for record in b.metrics.records if record.labels.get("tag") == "Bad")
    assert counts[f"error/{reason}"].value == counts["stop/error"].value == 2.0


@pytest.mark.parametrize(("how", "when"), [("raise", "reset"), ("hang", "step")])
async def test_errors_that_the_rule_does_not_name_are_tried_again(bench, how: str, when: str):
    env = custom(
        "BadEnv", "process", env_config={"how": how, "when": when}, step_timeout_s=6.0, on_env_error={"reward": -1.0}
    )
    async with bench(train_episode(0), custom_envs={"Bad": env}) as b:
        await b.until_done(1)
    assert [reason for _, reason in b.buffer.failed] == [{"reset": "reset_error", "step": "step_timeout"}[when]]


async def test_an_episode_timeout_fails_it_and_aborts_its_turn(bench, tokenizer: Tokenizer):
    env = custom("CountingEnv", episode_timeout_s=2.0)
    slow = FakeGeneration(walker(tokenizer), delay_s=lambda _: 60.0)
    async with bench(train_episode(0), generation=slow, custom_envs={"Slow": env}) as b:
        await b.until_done(1)
        await wait_until(lambda: len(slow.aborted) == 1)
    assert b.buffer.failed == [(train_episode(0), "episode_timeout")]


async def test_an_episode_outlives_a_sleep_longer_than_its_limit(bench, tokenizer: Tokenizer):
    class Sleeping(FakeGeneration):
        async def generate(self, requests, replica_id=""):
            with self.clock.stopped():
                for _ in range(6):
                    await asyncio.sleep(1.0)
                    yield []  # as the client says of engines that sleep
            async for completions in super().generate(requests, replica_id):
                yield completions

    env = custom("CountingEnv", episode_timeout_s=5.0, max_steps=1)
    async with bench(train_episode(0), generation=Sleeping(walker(tokenizer)), custom_envs={"Slow": env}) as b:
        await b.until_done(1)
    assert b.buffer.failed == []
    assert b.buffer.submitted[train_episode(0)].duration_s > 5.0


async def test_only_the_turn_in_flight_is_lost_when_a_replica_dies(bench, tokenizer: Tokenizer):
    """The replica dies at every third call; each episode continues from its tokens."""

    class Dying(FakeGeneration):
        async def generate(self, requests, replica_id=""):
            if len(self.calls) % 3 == 2:
                self.errors = [RetryableError("died")]
            async for completions in super().generate(requests, replica_id):
                yield completions

    async with bench(*group(0), generation=Dying(walker(tokenizer))) as b:
        await b.until_done(4)
    async with bench(*group(0)) as untroubled:
        await untroubled.until_done(4)
    assert b.buffer.failed == []
    for task, trajectory in b.buffer.submitted.items():
        expected = untroubled.buffer.submitted[task].segments[0].tokens
        assert trajectory.segments[0].tokens.tolist() == expected.tolist()


async def test_cancelled_episodes_stop_and_their_turns_are_aborted(bench, tokenizer: Tokenizer):
    stuck = FakeGeneration(walker(tokenizer), delay_s=lambda _: 60.0)
    tasks = group(0)
    async with bench(*tasks, generation=stuck) as b:
        await wait_until(lambda: b.worker.num_playing == 4 and bool(stuck.calls))
        b.buffer.to_cancel = tasks[:3]
        await wait_until(lambda: b.worker.num_playing == 1)
        await wait_until(lambda: len(stuck.aborted) == 3)
        assert b.buffer.failed == []
        assert not b.running.done()


async def test_places_of_cancelled_episodes_are_taken_by_others(bench, tokenizer: Tokenizer):
    stuck = FakeGeneration(walker(tokenizer), delay_s=lambda r: 60.0 if len(r.prompt) > 0 and stuck_now else 0.0)
    stuck_now = True
    async with bench(*group(0, 2), generation=stuck, rollout=RolloutConfig(max_env_num_per_worker=2)) as b:
        await wait_until(lambda: bool(stuck.calls))
        b.buffer.offer(*group(1, 2))
        stuck_now = False
        b.buffer.to_cancel = group(0, 2)
        await b.until_done(2)
    assert {task.number for task in b.buffer.submitted} == {1}
    assert merge_all(record.values for record in b.metrics.records)["cancelled"].value == 2


async def test_while_redis_is_silent_the_worker_waits_and_loses_nothing(bench):
    async with bench(*group(0)) as b:
        await wait_until(lambda: b.worker.num_playing > 0)
        b.buffer.down = True
        b.buffer.queue += group(1)
        await wait_until(lambda: b.buffer.refused >= 6)
        assert not b.running.done()
        b.buffer.down = False
        await b.until_done(8)
    assert len(b.buffer.submitted) == 8
    assert b.buffer.failed == []


async def test_a_drained_worker_finishes_its_episodes_and_claims_no_more(bench, tokenizer: Tokenizer):
    open_gate = False
    slow = FakeGeneration(walker(tokenizer), delay_s=lambda _: 0.0 if open_gate else 0.05)
    async with bench(*group(0), generation=slow) as b:
        await wait_until(lambda: b.worker.num_playing == 4)
        b.worker.drain()
        b.buffer.offer(*group(1))
        open_gate = True
        await b.until_done(4)
        await wait_until(lambda: b.buffer.heartbeats >= 3)
        assert {task.number for task in b.buffer.submitted} == {0}


async def test_a_paused_run_resumes_where_it_stopped(bench):
    async with bench() as b:
        b.buffer.draining = True
        await wait_until(lambda: b.buffer.heartbeats >= 2)
        b.buffer.offer(*group(0))
        await wait_until(lambda: b.buffer.heartbeats >= 5)
        assert b.buffer.claimed == []
        b.buffer.draining = False
        await b.until_done(4)


async def test_a_stopped_worker_gives_its_episodes_back(bench, tokenizer: Tokenizer):
    stuck = FakeGeneration(walker(tokenizer), delay_s=lambda _: 60.0)
    async with bench(*group(0), generation=stuck) as b:
        await wait_until(lambda: b.worker.num_playing == 4)
        b.worker.stop()
        async with asyncio.timeout(30):
            assert await b.running is WorkerEnd.STOPPED
    assert (b.worker.num_playing, b.buffer.released) == (0, 1)
    assert (b.buffer.failed, b.buffer.submitted) == ([], {})
    assert "cancelled" not in merge_all(record.values for record in b.metrics.records)


async def test_a_stopped_worker_does_not_wait_for_a_hung_env(bench, tmp_path: Path):
    env = custom("WaitingEnv", "thread", env_config={"gate": str(tmp_path / "gate")}, step_timeout_s=600.0)
    async with bench(train_episode(0), custom_envs={"Stuck": env}) as b:
        await wait_until(lambda: bool(b.generation.calls))
        b.worker.stop()
        async with asyncio.timeout(30):
            await b.running
        (tmp_path / "gate").touch()
    assert b.buffer.released == 1


async def test_a_worker_whose_threads_all_hang_asks_to_be_replaced(bench, tmp_path: Path):
    env = custom("WaitingEnv", "thread", env_config={"gate": str(tmp_path / "gate")}, step_timeout_s=0.1)
    config = RolloutConfig(num_threads=2, max_env_num_per_worker=2)
    async with bench(*group(0, 2), custom_envs={"Stuck": env}, rollout=config) as b:
        async with asyncio.timeout(30):
            assert await b.running is WorkerEnd.WORN_OUT
        (tmp_path / "gate").touch()
    # A heartbeat may see the last thread hang before its episode has failed; then that one is given back.
    assert {reason for _, reason in b.buffer.failed} <= {"step_timeout"}
    assert b.buffer.released == 1


async def test_a_task_that_cannot_be_is_failed_not_lost(bench):
    impossible = EpisodeTask(EpisodeKind.TRAIN, "run-0", 0, 0, 0, 0, sampling_name="nonesuch")
    async with bench(impossible, *group(1)) as b:
        await b.until_done(5)
    assert b.buffer.failed == [(impossible, "internal_error")]


async def test_a_trajectory_that_the_buffer_refuses_is_failed(bench):
    async with bench() as b:

        async def refuse(*_: object):
            raise BufferError("no")

        b.buffer.submit = refuse
        b.buffer.offer(train_episode(0))
        await b.until_done(1)
    assert b.buffer.failed == [(train_episode(0), "internal_error")]


async def test_an_episode_whose_failure_cannot_be_reported_ends_the_worker(bench):
    envs = {"Bad": custom("BadEnv", env_config={"how": "raise"})}
    async with bench(custom_envs=envs) as b:

        async def refuse(*_: object):
            raise BufferError("no")

        b.buffer.fail = refuse
        b.buffer.offer(train_episode(0))
        with pytest.raises(BufferError):
            await asyncio.wait_for(b.running, 30)
    assert b.buffer.released == 1
