"""Env worker: many episodes on one event loop.

Invariants: each claimed episode is submitted, failed with a reason, returned, or revoked by the buffer; a failing
episode affects no other; outages of Redis and generation are retried.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Protocol

from msgspec import structs

from offbeat.services.awake_clock import AwakeClock
from offbeat.services.buffer.api import ClaimLimits, RolloutBuffer, SubmitResult
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.errors import EpisodeError, MeshError
from offbeat.services.generation.client import GenerationClient
from offbeat.services.log_format import set_task_log_fields
from offbeat.services.messages.types import EpisodeKind, EpisodeTask, Trajectory
from offbeat.services.retry import retry_until_answered
from offbeat.services.reward.sample import encode_sample
from offbeat.services.rollout.config import WorkerSettings
from offbeat.services.rollout.data.prompts import PromptSource
from offbeat.services.rollout.data.source import DATASET_KEY, DataSource
from offbeat.services.rollout.episode_limit import EpisodeLimit
from offbeat.services.rollout.episodes.transcript import Transcript
from offbeat.services.rollout.group_scoring import GroupScoring
from offbeat.services.rollout.metrics import WorkerMetrics
from offbeat.services.rollout.outcomes import REWARDS_KEY, EpisodeOutcomes, key_of
from offbeat.services.rollout.player import EpisodePlayer
from offbeat.services.rollout.rewards import EpisodeRewards, ScoredEpisode
from offbeat.services.rollout.slots import Slot, SlotPool
from offbeat.services.rollout.tasks import Task
from offbeat.services.rollout.wait_status import CpuShare, Wait, Waiting, Waits
from offbeat.services.telemetry import MetricRecord
from offbeat.services.weights.replica_reports import ReplicaLoad

logger = logging.getLogger(__name__)

MAX_IDLE_S = 1.0
MAX_HEARTBEAT_INTERVAL_S = 0.5
REPORT_INTERVAL_S = 1.0
WAIT_STATUS_INTERVAL_S = 0.5
LOAD_INTERVAL_S = 1.0
"""As replicas report it."""
CPU_WINDOW = 10
"""Wait statuses over whose time the CPU is averaged."""
SHUTDOWN_TIMEOUT_S = 2.0


class WorkerEnd(StrEnum):
    STOPPED = "stopped"
    WORN_OUT = "worn_out"
    """Too many threads hang."""


class WaitsWriter(Protocol):
    async def show(self, worker_id: str, report: Mapping[str, Any]) -> None: ...


class LoadReader(Protocol):
    async def __call__(self) -> Mapping[str, ReplicaLoad]:
        """Return the load of each replica."""
        ...


class AsyncMetricsSink(Protocol):
    async def append(self, record: MetricRecord) -> None: ...


class EnvWorker:
    def __init__(
        self,
        settings: WorkerSettings,
        worker_id: str,
        *,
        buffer: RolloutBuffer,
        generation: GenerationClient,
        metrics: AsyncMetricsSink,
        chat: ChatFormat | None,
        board: WaitsWriter | None = None,
        read_loads: LoadReader | None = None,
        data: DataSource | None = None,
        prompts: PromptSource | None = None,
        rewards: EpisodeRewards | None = None,
        clock: AwakeClock | None = None,
    ) -> None:
        """chat: None if nothing is sampled. board: None publishes no wait status. read_loads: None ignores
        `kv_usage_target`. data: rows of training groups; None: episodes. prompts: rows that episodes answer, scored by
        `rewards`. clock: of `generation`.
        """
        self._settings = settings
        self._worker_id = worker_id
        self._buffer = buffer
        self._metrics = metrics
        self._board = board
        self._rewards = rewards
        self._waits = Waits()
        self._reporter = WorkerMetrics(worker_id)
        self._scoring = GroupScoring(worker_id, buffer, rewards, self._reporter)
        self._player = EpisodePlayer(
            settings,
            worker_id,
            buffer=buffer,
            generation=generation,
            reporter=self._reporter,
            chat=chat,
            clock=clock or AwakeClock(),
            data=data,
            prompts=prompts,
        )
        self._outcomes = EpisodeOutcomes(settings.train_env_manager.group_size)
        self._comparisons = EpisodeOutcomes(settings.train_env_manager.group_size)
        """Of rewards of whole groups."""
        self._playing: dict[EpisodeTask, asyncio.Task[None]] = {}
        managers = {EpisodeKind.TRAIN: settings.train_env_manager, EpisodeKind.EVAL: settings.val_env_manager}
        limits = {kind: limit for kind, manager in managers.items() if (limit := manager.max_env_num_per_worker)}
        self._slots = SlotPool(settings.rollout.max_env_num_per_worker, limits=limits)
        self._may_claim = asyncio.Event()
        self._may_claim.set()
        self._read_loads = read_loads
        self._episode_limit: int | None = None
        self._drained = False
        self._end: WorkerEnd | None = None
        self._ended = asyncio.Event()
        self._lost: BaseException | None = None
        self._calls_reported = 0
        self._cpu_reported_s = time.process_time()

    @property
    def num_playing(self) -> int:
        return len(self._playing)

    @property
    def num_calls(self) -> int:
        return self._player.num_calls

    async def run(self) -> WorkerEnd:
        """Run episodes until stopped or worn out; return unfinished ones.

        Raises:
            MeshError: the buffer rejected a request; restart.
        """
        work = [self._claim(), self._heartbeat(), self._report(), self._show_waits(), self._ended.wait()]
        if (target := self._settings.rollout.kv_usage_target) is not None and self._read_loads is not None:
            work.insert(0, self._follow_load(target, self._read_loads))  # before the first claim
        chores = [asyncio.create_task(chore) for chore in work]
        try:
            done, _ = await asyncio.wait(chores, return_when=asyncio.FIRST_COMPLETED)
            for chore in done:
                chore.result()
            if self._lost:
                raise self._lost
            return self._end or WorkerEnd.STOPPED
        finally:
            await self._stop_tasks(chores)

    def share_with(self, num_workers: int) -> None:
        self._player.envs.share_with(num_workers)

    def drain(self) -> None:
        """Claim no more episodes."""
        self._drained = True
        self._may_claim.clear()

    def stop(self) -> None:
        self._finish(WorkerEnd.STOPPED)

    def _finish(self, reason: WorkerEnd) -> None:
        self._end = self._end or reason
        self._ended.set()

    async def _stop_tasks(self, chores: list[asyncio.Task[Any]]) -> None:
        self._ended.set()
        tasks = [*chores, *self._playing.values()]
        for task in tasks:
            task.cancel()
        # Envs that do not finish in time end with the process.
        await asyncio.wait(tasks, timeout=SHUTDOWN_TIMEOUT_S)
        await self._return_episodes()
        await asyncio.wait(tasks, timeout=max(0.0, self._settings.agent_grace_s - SHUTDOWN_TIMEOUT_S))
        ending = [each.close() for each in (self._player, self._rewards) if each is not None]
        await asyncio.wait([asyncio.create_task(end) for end in ending], timeout=SHUTDOWN_TIMEOUT_S)

    async def _return_episodes(self) -> None:
        try:
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                await self._buffer.release(self._worker_id)
                await self._write_metrics()
        except (MeshError, TimeoutError) as error:
            logger.warning("could not return episodes: %s; they are reassigned after the worker's timeout", error)

    # --- chores ---------------------------------------------------------------------------------------------------------

    async def _claim(self) -> None:
        work = None
        try:
            while True:
                await self._may_claim.wait()
                free, free_of = self._slots.num_free, self._slots.num_free_of
                of_kind = ClaimLimits(train=free_of(EpisodeKind.TRAIN), evaluation=free_of(EpisodeKind.EVAL))
                tasks = (
                    await retry_until_answered(
                        lambda free=free, of_kind=of_kind: self._buffer.claim(self._worker_id, free, of_kind)
                    )
                    if free and any(of_kind)
                    else []
                )
                for task in tasks:
                    self._begin(task)
                if len(tasks) >= free:
                    await self._slots.wait_for_free_slots()
                    continue
                work = work or asyncio.create_task(self._wait_for_work())
                if of_kind.is_used_up(tasks, free):
                    await self._wait_for_work_or_slots(work)
                else:
                    await asyncio.wait({work})
                if work.done():
                    work.result()
                    work = None
        finally:
            if work is not None:
                work.cancel()

    async def _wait_for_work(self) -> None:
        await retry_until_answered(lambda: self._buffer.wait_for_work(self._worker_id, MAX_IDLE_S))

    async def _wait_for_work_or_slots(self, work: asyncio.Task[None]) -> None:
        """Wait for work, or for slots of a kind at its limit while others are free."""
        freed = asyncio.create_task(self._slots.wait_for_free_slots())
        try:
            await asyncio.wait({work, freed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            freed.cancel()

    async def _heartbeat(self) -> None:
        interval_s = min(MAX_HEARTBEAT_INTERVAL_S, self._settings.worker_timeout_s / 5)
        while True:
            orders = await retry_until_answered(lambda: self._buffer.heartbeat(self._worker_id))
            for task in orders.cancelled:
                if playing := self._playing.get(task):
                    playing.cancel()
            if orders.draining or self._drained:
                self._may_claim.clear()
            else:
                self._may_claim.set()
            if self._player.envs.is_worn_out or (self._rewards is not None and self._rewards.is_worn_out):
                self._finish(WorkerEnd.WORN_OUT)
            await asyncio.sleep(interval_s)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            await self._write_metrics()

    async def _show_waits(self) -> None:
        if self._board is None:
            await asyncio.Event().wait()
            return
        cpu, share = CpuShare(CPU_WINDOW), 0.0
        while True:
            outcomes = {"episodes": self._outcomes.report(), "comparisons": self._comparisons.report()}
            report = {**self._waits.report(), **outcomes, "cpu": share}
            await retry_until_answered(lambda board=self._board, report=report: board.show(self._worker_id, report))
            await asyncio.sleep(WAIT_STATUS_INTERVAL_S)
            share = cpu.take()

    async def _follow_load(self, target: float, read_loads: LoadReader) -> None:
        rollout, ended = self._settings.rollout, 0
        limit = EpisodeLimit(
            target,
            rollout.max_env_num_per_worker,
            num_workers=rollout.num_workers,
            sequence_length=self._settings.sequence_length,
        )
        self._slots.resize(limit.limit)
        while True:
            loads = await retry_until_answered(read_loads)
            finished, ended = self._outcomes.num_finished - ended, self._outcomes.num_finished
            if why := limit.observe(loads, self._slots.num_running, finished):
                logger.info("plays at most %d episodes at a time: %s", limit.limit, why)
            self._slots.resize(limit.limit)
            self._episode_limit = limit.limit
            await asyncio.sleep(LOAD_INTERVAL_S)

    async def _write_metrics(self) -> None:
        calls, cpu_s = self._player.num_calls, time.process_time()
        records = self._reporter.records(
            playing=len(self._playing),
            hung_threads=self._player.envs.num_hung + (self._rewards.num_hung if self._rewards is not None else 0),
            calls=calls - self._calls_reported,
            cpu_s=cpu_s - self._cpu_reported_s,
            episode_limit=self._episode_limit,
            failed_attempts=self._rewards.take_failures() if self._rewards is not None else {},
        )
        self._calls_reported, self._cpu_reported_s = calls, cpu_s
        for record in records:
            await retry_until_answered(lambda record=record: self._metrics.append(record))

    # --- one episode ----------------------------------------------------------------------------------------------------

    def _begin(self, task: EpisodeTask) -> None:
        slot = self._slots.take(task.kind)
        playing = asyncio.create_task(self._run_episode(task, slot), name=f"{task.group_id}/{task.index}")
        self._playing[task] = playing
        playing.add_done_callback(lambda done: self._release_episode(task, slot, done))

    def _release_episode(self, task: EpisodeTask, slot: Slot, done: "asyncio.Task[None]") -> None:
        if self._playing.get(task) is done:  # and not its next attempt
            del self._playing[task]
            self._waits.leave(task)
        slot.leave()
        if not done.cancelled() and (error := done.exception()):
            # The failure could not be reported; the buffer takes the episode back when this worker is replaced.
            logger.error("episode %s/%s was lost", task.group_id, task.index, exc_info=error)
            self._lost = error
            self._ended.set()

    async def _run_episode(self, task: EpisodeTask, slot: Slot) -> None:
        tag = ""
        set_task_log_fields(group=task.number, version=task.min_version)
        try:
            waiting = self._waits.begin(task)
            tag = self._player.eval_tag(task)
            env_task = await self._player.find_task(task)
            tag = env_task.tag
            result = await self._play_or_score(task, env_task, slot, waiting)
        except asyncio.CancelledError:
            if not self._ended.is_set():  # on shutdown it is returned
                self._reporter.cancelled(task.kind, tag)
            raise
        except Exception as error:
            reason = error.reason if isinstance(error, EpisodeError) else "internal_error"
            is_expected = isinstance(error, MeshError)
            logger.warning("episode %s/%s failed: %s", task.group_id, task.index, error, exc_info=not is_expected)
            self._reporter.failed(task.kind, tag, reason)
            self._count_failure(task, tag, error)
            await retry_until_answered(lambda: self._buffer.fail(self._worker_id, task, reason))
        else:
            if not task.is_scoring:
                self._reporter.submitted(task.kind, tag, result.value)

    def _count_failure(self, task: EpisodeTask, tag: str, error: Exception) -> None:
        if task.is_scoring:
            self._comparisons.failed(REWARDS_KEY, error)
        else:
            self._outcomes.failed(DATASET_KEY if self._player.is_row(task) else key_of(error, tag), error)

    async def _play_or_score(self, task: EpisodeTask, env_task: Task, slot: Slot, waiting: Waiting) -> SubmitResult:
        """Submit an episode, or the rewards of a group; raises EpisodeError."""
        if task.is_scoring:
            result = await self._scoring.run(task, env_task.tag, slot, waiting)
            self._comparisons.finished()
            return result
        transcript = None if self._rewards is None else self._rewards.begin(env_task.tag)
        trajectory, member = await self._player.make_trajectory(task, env_task, waiting, transcript), None
        if self._rewards is not None and transcript is not None:
            trajectory, member = await self._score(self._rewards, trajectory, transcript, task, slot, waiting)
        sample = b"" if member is None else encode_sample(member)
        waiting.enter(Wait.BUFFER)
        await slot.finish_and_wait_for_flush()
        result = await retry_until_answered(lambda: self._buffer.submit(self._worker_id, task, trajectory, sample))
        self._outcomes.finished()
        self._reporter.finished(task.kind, trajectory, is_scored=member is None)
        return result

    async def _score(
        self,
        rewards: EpisodeRewards,
        trajectory: Trajectory,
        transcript: Transcript,
        task: EpisodeTask,
        slot: Slot,
        waiting: Waiting,
    ) -> ScoredEpisode:
        """Return the episode with its rewards, lending its slot; raises RewardError."""
        slot.lend()
        waiting.enter(Wait.REWARD)
        began = time.monotonic()
        scored, member = await rewards.add(trajectory, task.kind, transcript)
        seconds = time.monotonic() - began
        self._reporter.scored(task.kind, trajectory.tag, seconds)
        return ScoredEpisode(structs.replace(scored, duration_s=scored.duration_s + seconds), member)
