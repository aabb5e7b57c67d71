"""Env worker: many episodes on one event loop.

Invariants: each claimed episode is submitted, failed with a reason, returned, or revoked by the buffer; a failing
episode affects no other; outages of Redis and generation are retried.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any, Protocol

from msgspec import structs

from offbeat.services.awake_clock import AwakeClock
from offbeat.services.buffer.api import ClaimLimits, RolloutBuffer
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.errors import EpisodeError, MeshError
from offbeat.services.generation.client import GenerationClient
from offbeat.services.log_format import set_task_log_fields
from offbeat.services.messages.types import EpisodeKind, EpisodeTask, Sampling, Trajectory
from offbeat.services.retry import retry_until_answered
from offbeat.services.rollout.agents.episode import play_with_agent, runtime_for
from offbeat.services.rollout.config import WorkerSettings
from offbeat.services.rollout.data.prompts import PromptSource
from offbeat.services.rollout.data.sampled import is_sampled, mark_given, sample_response
from offbeat.services.rollout.data.source import DATASET_KEY, DataSource
from offbeat.services.rollout.envs.pool import EnvPool, LeasedEnv
from offbeat.services.rollout.episodes.episode import EpisodePlan, play
from offbeat.services.rollout.episodes.instrumented import InstrumentedEpisode
from offbeat.services.rollout.episodes.sampler import EpisodeSampler, build_samplings
from offbeat.services.rollout.episodes.turn_batcher import TurnBatcher
from offbeat.services.rollout.metrics import WorkerMetrics
from offbeat.services.rollout.outcomes import EpisodeOutcomes, key_of
from offbeat.services.rollout.rewards import EpisodeRewards
from offbeat.services.rollout.slots import Slot, SlotPool
from offbeat.services.rollout.task_assigner import TaskAssigner
from offbeat.services.rollout.tasks import EvalTasks, Task
from offbeat.services.rollout.wait_status import Wait, Waiting, Waits
from offbeat.services.telemetry import MetricRecord
from offbeat.services.tracing.api import EpisodeSpans
from offbeat.services.tracing.factory import open_episode_tracer

logger = logging.getLogger(__name__)

MAX_IDLE_S = 1.0
MAX_HEARTBEAT_INTERVAL_S = 0.5
REPORT_INTERVAL_S = 1.0
WAIT_STATUS_INTERVAL_S = 0.5
SHUTDOWN_TIMEOUT_S = 2.0


class WorkerEnd(StrEnum):
    STOPPED = "stopped"
    WORN_OUT = "worn_out"
    """Too many threads hang."""


class WaitsWriter(Protocol):
    async def show(self, worker_id: str, report: Mapping[str, Any]) -> None: ...


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
        chat: ChatFormat,
        board: WaitsWriter | None = None,
        data: DataSource | None = None,
        prompts: PromptSource | None = None,
        rewards: EpisodeRewards | None = None,
        clock: AwakeClock | None = None,
    ) -> None:
        """board: None publishes no wait status. data: rows of training groups; None: episodes. prompts: rows that
        episodes answer, scored by `rewards`. clock: of `generation`.
        """
        self._settings = settings
        self._worker_id = worker_id
        self._buffer = buffer
        self._metrics = metrics
        self._chat = chat
        self._board = board
        self._data = data
        self._prompts = prompts
        self._rewards = rewards
        self._waits = Waits()
        self._clock = clock or AwakeClock()
        rollout = settings.rollout
        self._batcher = TurnBatcher(
            generation, rollout.coalesce_s, settings.request_timeout_s, self._clock, rollout.max_turns_per_call
        )
        self._envs = EnvPool(settings.custom_envs, settings.rollout.num_threads, settings.rollout.num_workers)
        self._agents = runtime_for(settings.custom_envs, settings.model_folder)
        self._reporter = WorkerMetrics(worker_id)
        self._outcomes = EpisodeOutcomes(settings.train_env_manager.group_size)
        self._eval_tasks = EvalTasks(settings, settings.seed)
        self._eval_lock = asyncio.Lock()
        self._train_tasks = TaskAssigner(settings, settings.seed, buffer)
        self._samplings = build_samplings(settings, self._chat.stop_ids)
        self._playing: dict[EpisodeTask, asyncio.Task[None]] = {}
        managers = {EpisodeKind.TRAIN: settings.train_env_manager, EpisodeKind.EVAL: settings.val_env_manager}
        limits = {kind: limit for kind, manager in managers.items() if (limit := manager.max_env_num_per_worker)}
        self._slots = SlotPool(settings.rollout.max_env_num_per_worker, limits=limits)
        self._may_claim = asyncio.Event()
        self._may_claim.set()
        self._drained = False
        self._end: WorkerEnd | None = None
        self._ended = asyncio.Event()
        self._lost: BaseException | None = None
        self._calls_reported = 0
        self._tracer = open_episode_tracer(
            settings.telemetry, run_id=settings.run_id, run_uid=settings.run_uid, worker_id=worker_id
        )

    @property
    def num_playing(self) -> int:
        return len(self._playing)

    @property
    def num_calls(self) -> int:
        return self._batcher.num_calls

    async def run(self) -> WorkerEnd:
        """Run episodes until stopped or worn out; return unfinished ones.

        Raises:
            MeshError: the buffer rejected a request; restart.
        """
        work = (self._claim(), self._heartbeat(), self._report(), self._show_waits(), self._ended.wait())
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
        self._envs.share_with(num_workers)

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
        await self._batcher.close()
        ending = [each.close() for each in (self._envs, self._agents, self._rewards) if each is not None]
        ending.append(asyncio.to_thread(self._tracer.close))
        await asyncio.wait([asyncio.create_task(end) for end in ending], timeout=SHUTDOWN_TIMEOUT_S)
        try:
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                await self._buffer.release(self._worker_id)
                await self._write_metrics()
        except (MeshError, TimeoutError) as error:
            logger.warning("could not return episodes: %s; they are reassigned after the worker's timeout", error)

    # --- chores ---------------------------------------------------------------------------------------------------------

    async def _claim(self) -> None:
        position, work = "$", None
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
                work = work or asyncio.create_task(self._wait_for_work(position))
                if of_kind.is_used_up(tasks, free):
                    await self._wait_for_work_or_slots(work)
                else:
                    await asyncio.wait({work})
                if work.done():
                    position, work = work.result(), None
        finally:
            if work is not None:
                work.cancel()

    async def _wait_for_work(self, position: str) -> str:
        return await retry_until_answered(lambda: self._buffer.wait_for_work(position, MAX_IDLE_S))

    async def _wait_for_work_or_slots(self, work: asyncio.Task[str]) -> None:
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
            if self._envs.is_worn_out:
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
        while True:
            report = {**self._waits.report(), "episodes": self._outcomes.report()}
            await retry_until_answered(lambda board=self._board, report=report: board.show(self._worker_id, report))
            await asyncio.sleep(WAIT_STATUS_INTERVAL_S)

    async def _write_metrics(self) -> None:
        calls = self._batcher.num_calls
        records = self._reporter.records(
            playing=len(self._playing),
            hung_threads=self._envs.num_hung,
            calls=calls - self._calls_reported,
            failed_attempts=self._rewards.take_failures() if self._rewards is not None else {},
        )
        self._calls_reported = calls
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
            env_task = await self._task_of(task)
            tag = env_task.tag
            waiting = self._waits.begin(task)
            trajectory = await (self._read(task) if self._reads(task) else self._play(task, env_task, waiting))
            if self._rewards is not None:
                trajectory = await self._score(self._rewards, trajectory, task, slot, waiting)
            waiting.enter(Wait.BUFFER)
            await slot.finish_and_wait_for_flush()
            result = await retry_until_answered(lambda: self._buffer.submit(self._worker_id, task, trajectory))
        except asyncio.CancelledError:
            if not self._ended.is_set():  # on shutdown it is returned
                self._reporter.cancelled(task.kind, tag)
            raise
        except Exception as error:
            reason = error.reason if isinstance(error, EpisodeError) else "internal_error"
            is_expected = isinstance(error, MeshError)
            logger.warning("episode %s/%s failed: %s", task.group_id, task.index, error, exc_info=not is_expected)
            self._reporter.failed(task.kind, tag, reason)
            self._outcomes.failed(DATASET_KEY if self._reads(task) else key_of(error, tag), error)
            await retry_until_answered(lambda: self._buffer.fail(self._worker_id, task, reason))
        else:
            self._outcomes.finished()
            self._reporter.finished(task.kind, trajectory)
            self._reporter.submitted(task.kind, tag, result.value)

    async def _score(
        self, rewards: EpisodeRewards, trajectory: Trajectory, task: EpisodeTask, slot: Slot, waiting: Waiting
    ) -> Trajectory:
        """Return the episode with its rewards, lending its slot; raises RewardError."""
        slot.lend()
        waiting.enter(Wait.REWARD)
        began = time.monotonic()
        scored = await rewards.add(trajectory, task.kind)
        seconds = time.monotonic() - began
        self._reporter.scored(task.kind, trajectory.tag, seconds)
        text = scored.text if self._keeps_text(task) else ()
        return structs.replace(scored, text=text, duration_s=scored.duration_s + seconds)

    def _keeps_text(self, task: EpisodeTask) -> bool:
        return self._settings.rollout.keep_text or task.kind is EpisodeKind.EVAL

    def _reads(self, task: EpisodeTask) -> bool:
        return self._data is not None and task.kind is EpisodeKind.TRAIN

    async def _read(self, task: EpisodeTask) -> Trajectory:
        assert self._data is not None, "_reads"
        began = time.monotonic()
        trajectory = await asyncio.to_thread(
            self._data.trajectory,
            task.number,
            task.index,
            task.min_version,
            group_id=task.group_id,
            attempt=task.attempt,
        )
        trajectory = await self._sample_row(task, trajectory)
        return structs.replace(trajectory, worker_id=self._worker_id, duration_s=time.monotonic() - began)

    async def _sample_row(self, task: EpisodeTask, trajectory: Trajectory) -> Trajectory:
        """Return the row with the policy's response, if it is to be sampled."""
        settings = self._settings
        if not settings.sampled_share:
            return trajectory
        if not is_sampled(task.number, settings.seed, settings.sampled_share):
            return mark_given(trajectory)
        sampling = self._samplings[task.sampling_name]
        with self._sampler(task, sampling, continues=False) as sampler:
            return await sample_response(
                trajectory,
                sampler,
                max_new_tokens=sampling.max_new_tokens,
                max_tokens=settings.sequence_length,
            )

    def _sampler(self, task: EpisodeTask, sampling: Sampling, *, continues: bool) -> EpisodeSampler:
        return EpisodeSampler(
            self._batcher,
            sampling,
            task.min_version,
            retry_s=self._settings.rollout.max_generation_retry_s,
            continues=continues,
            group=task.group_id,
        )

    async def _play(self, task: EpisodeTask, env_task: Task, waiting: Waiting) -> Trajectory:
        rules = self._settings.custom_envs[env_task.tag]
        limit = asyncio.timeout(None)
        try:
            async with limit:
                with self._clock.limited(limit, rules.episode_timeout_s):
                    return await self._play_once(task, env_task, waiting)
        except TimeoutError:
            if limit.expired():
                raise EpisodeError("episode_timeout", f"not over in {rules.episode_timeout_s:g} s") from None
            raise

    async def _play_once(self, task: EpisodeTask, env_task: Task, waiting: Waiting) -> Trajectory:
        leased = await self._envs.take(env_task.tag, task.kind)
        finished = False
        try:
            trajectory = await self._play_in(leased, task, env_task, waiting)
            finished = True
        finally:
            if not (finished and self._envs.keep(leased)):  # the env may be in any state
                await asyncio.shield(leased.runner.close())
        return trajectory

    async def _play_in(self, leased: LeasedEnv, task: EpisodeTask, env_task: Task, waiting: Waiting) -> Trajectory:
        settings, prompts = self._settings, self._prompts
        sampling = self._samplings[task.sampling_name]
        if task.temperature is not None:
            sampling = replace(sampling, temperature=task.temperature)
        plan = EpisodePlan(
            task=task,
            tag=env_task.tag,
            seed=env_task.seed,
            env=settings.custom_envs[env_task.tag],
            sequence_length=settings.sequence_length,
            sampling=sampling,
            keep_text=self._keeps_text(task) or self._rewards is not None,
            worker_id=self._worker_id,
            prompt=None if prompts is None else await prompts.read(task.kind, env_task.seed),
            prompt_length=settings.data.prompt_length if settings.data else None,
        )
        with self._tracer.episode(task, env_task.tag, sampling, has_tools=bool(leased.traits.functions)) as trace:
            trajectory = await self._play_plan(plan, leased, waiting, trace)
            trace.finish(trajectory)
        return structs.replace(trajectory, baseline=task.is_baseline, traceparent=trace.traceparent)

    async def _play_plan(
        self, plan: EpisodePlan, leased: LeasedEnv, waiting: Waiting, trace: EpisodeSpans
    ) -> Trajectory:
        continues = plan.env.continues_prompts and self._chat.rewriting is None
        with self._sampler(plan.task, plan.sampling, continues=continues) as sampler:
            calls = InstrumentedEpisode(
                plan.task.kind,
                plan.tag,
                env=leased.runner,
                step_limiter=self._envs.step_limiter(plan.tag),
                sampler=sampler,
                waiting=waiting,
                reporter=self._reporter,
                between=Wait.AGENT if plan.env.agent_runner else None,
                trace=trace,
            )
            if plan.env.agent_runner and self._agents:
                runner = plan.env.agent_runner
                return await play_with_agent(plan, runner, calls, leased.traits, calls.sample, self._agents)
            return await play(plan, calls, leased.traits, calls.sample, self._chat)

    async def _task_of(self, task: EpisodeTask) -> Task:
        if self._reads(task):
            return Task(self._settings.pipeline, task.number)
        if self._prompts is not None:
            if task.kind is EpisodeKind.EVAL:
                return self._prompts.eval_task(task.number, greedy=task.sampling_name == "greedy")
            return self._prompts.train_task(task.number)
        if task.kind is EpisodeKind.EVAL:
            async with self._eval_lock:
                # takes seconds, because the env makes every task once to find distinct ones
                return await asyncio.to_thread(self._eval_tasks.task, task.number)
        return await self._train_tasks.task(task.number)
