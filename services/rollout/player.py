"""Trajectories of claimed episodes: rows of data, or envs and agents that play."""

import asyncio
import time
from dataclasses import replace

from msgspec import structs

from offbeat.services.awake_clock import AwakeClock
from offbeat.services.buffer.api import RolloutBuffer
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.errors import EpisodeError
from offbeat.services.generation.client import GenerationClient
from offbeat.services.messages.types import EpisodeKind, EpisodeTask, Sampling, Trajectory
from offbeat.services.rollout.agents.episode import agent_slot, play_with_agent, runtime_for
from offbeat.services.rollout.config import WorkerSettings
from offbeat.services.rollout.data.prompts import PromptSource
from offbeat.services.rollout.data.sampled import is_sampled, mark_given, sample_response
from offbeat.services.rollout.data.source import DataSource
from offbeat.services.rollout.envs.pool import EnvPool, LeasedEnv
from offbeat.services.rollout.episodes.episode import EpisodePlan, play
from offbeat.services.rollout.episodes.instrumented import InstrumentedEpisode
from offbeat.services.rollout.episodes.sampler import BASELINE, EpisodeSampler, build_samplings
from offbeat.services.rollout.episodes.transcript import Transcript
from offbeat.services.rollout.episodes.turn_batcher import TurnBatcher
from offbeat.services.rollout.metrics import WorkerMetrics
from offbeat.services.rollout.task_assigner import TaskAssigner
from offbeat.services.rollout.tasks import EvalTasks, Task
from offbeat.services.rollout.wait_status import Wait, Waiting
from offbeat.services.tracing.api import EpisodeSpans
from offbeat.services.tracing.factory import open_episode_tracer


class EpisodePlayer:
    def __init__(
        self,
        settings: WorkerSettings,
        worker_id: str,
        *,
        buffer: RolloutBuffer,
        generation: GenerationClient,
        reporter: WorkerMetrics,
        chat: ChatFormat | None,
        clock: AwakeClock,
        data: DataSource | None,
        prompts: PromptSource | None,
    ) -> None:
        """chat: None if nothing is sampled. clock: of `generation`."""
        self._settings = settings
        self._worker_id = worker_id
        self._reporter = reporter
        self._chat = chat
        self._clock = clock
        self._data = data
        self._prompts = prompts
        rollout = settings.rollout
        self._batcher = TurnBatcher(
            generation, rollout.coalesce_s, settings.request_timeout_s, clock, rollout.max_turns_per_call
        )
        self.envs = EnvPool(settings.custom_envs, rollout.num_threads, rollout.num_workers)
        self._agents = runtime_for(settings.custom_envs, settings.model_folder, clock, image_input=settings.image_input)
        self._eval_tasks = EvalTasks(settings, settings.seed)
        self._train_tasks = TaskAssigner(settings, settings.seed, buffer)
        self._samplings = {} if chat is None else build_samplings(settings, chat.stop_ids)
        self._tracer = open_episode_tracer(
            settings.telemetry, run_id=settings.run_id, run_uid=settings.run_uid, worker_id=worker_id
        )

    @property
    def num_calls(self) -> int:
        """Calls of the generation service."""
        return self._batcher.num_calls

    async def close(self) -> None:
        await self._batcher.close()
        ending = [each.close() for each in (self.envs, self._agents) if each is not None]
        ending.append(asyncio.to_thread(self._tracer.close))
        await asyncio.wait([asyncio.create_task(end) for end in ending])

    def keeps_text(self, task: EpisodeTask) -> bool:
        return self._settings.rollout.keep_text or task.kind is EpisodeKind.EVAL

    def is_row(self, task: EpisodeTask) -> bool:
        return self._data is not None and task.kind is EpisodeKind.TRAIN

    def eval_tag(self, task: EpisodeTask) -> str:
        """Return the tag of an evaluation in an env, else the empty text."""
        if self._prompts is not None or task.kind is not EpisodeKind.EVAL:
            return ""
        return self._eval_tasks.tag_of(task.number, greedy=task.sampling_name == "greedy")

    async def find_task(self, task: EpisodeTask) -> Task:
        """Raises EpisodeError."""
        if self.is_row(task):
            return Task(self._settings.pipeline, task.number)
        greedy = task.sampling_name == "greedy"
        if self._prompts is not None:
            if task.kind is EpisodeKind.EVAL:
                return self._prompts.eval_task(task.number, greedy=greedy)
            return await asyncio.to_thread(self._prompts.train_task, task.number)  # computes orders of rows
        if task.kind is EpisodeKind.EVAL:
            return await self._eval_tasks.find(task.number, self.envs.find_seeds, greedy=greedy)
        return await self._train_tasks.task(task.number)

    async def make_trajectory(
        self, task: EpisodeTask, env_task: Task, waiting: Waiting, transcript: Transcript | None = None
    ) -> Trajectory:
        """Read or play an episode; raises EpisodeError. transcript: to be filled by one that is played."""
        return await (self._read(task) if self.is_row(task) else self._play(task, env_task, waiting, transcript))

    async def _read(self, task: EpisodeTask) -> Trajectory:
        assert self._data is not None, "a row"
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
        sampling = self._sampling(task)
        with self._sampler(task, sampling, continues=False) as sampler:
            return await sample_response(
                trajectory,
                sampler,
                max_new_tokens=sampling.max_new_tokens,
                max_tokens=settings.sequence_length,
            )

    def _sampling(self, task: EpisodeTask) -> Sampling:
        is_baseline = task.is_baseline and task.sampling_name == "greedy"
        sampling = self._samplings[BASELINE if is_baseline else task.sampling_name]
        return sampling if task.temperature is None else replace(sampling, temperature=task.temperature)

    def _sampler(self, task: EpisodeTask, sampling: Sampling, *, continues: bool) -> EpisodeSampler:
        return EpisodeSampler(
            self._batcher,
            sampling,
            task.min_version,
            retry_s=self._settings.rollout.max_generation_retry_s,
            continues=continues,
            group=task.group_id,
        )

    async def _play(
        self, task: EpisodeTask, env_task: Task, waiting: Waiting, transcript: Transcript | None
    ) -> Trajectory:
        rules = self._settings.custom_envs[env_task.tag]
        async with agent_slot(self._agents, env_task.tag, rules):
            limit = asyncio.timeout(None)
            try:
                async with limit:
                    with self._clock.limited(limit, rules.episode_timeout_s):
                        return await self._play_once(task, env_task, waiting, transcript)
            except TimeoutError:
                if limit.expired():
                    raise EpisodeError("episode_timeout", f"not over in {rules.episode_timeout_s:g} s") from None
                raise

    async def _play_once(
        self, task: EpisodeTask, env_task: Task, waiting: Waiting, transcript: Transcript | None
    ) -> Trajectory:
        leased = await self.envs.take(env_task.tag, task.kind)
        finished = False
        try:
            trajectory = await self._play_in(leased, task, env_task, waiting, transcript)
            finished = True
        finally:
            if not (finished and self.envs.keep(leased)):  # the env may be in any state
                await asyncio.shield(leased.runner.close())
        return trajectory

    async def _play_in(
        self, leased: LeasedEnv, task: EpisodeTask, env_task: Task, waiting: Waiting, transcript: Transcript | None
    ) -> Trajectory:
        settings, prompts = self._settings, self._prompts
        sampling = self._sampling(task)
        plan = EpisodePlan(
            task=task,
            tag=env_task.tag,
            seed=env_task.seed,
            env=settings.custom_envs[env_task.tag],
            sequence_length=settings.sequence_length,
            sampling=sampling,
            keep_text=self.keeps_text(task),
            worker_id=self._worker_id,
            prompt=None if prompts is None else await prompts.read(task.kind, env_task.seed),
            prompt_length=settings.data.prompt_length if settings.data else None,
            transcript=transcript,
        )
        with self._tracer.episode(task, env_task.tag, sampling, has_tools=bool(leased.traits.functions)) as trace:
            trajectory = await self._play_plan(plan, leased, waiting, trace)
            trace.finish(trajectory)
        return structs.replace(trajectory, baseline=task.is_baseline, traceparent=trace.traceparent)

    async def _play_plan(
        self, plan: EpisodePlan, leased: LeasedEnv, waiting: Waiting, trace: EpisodeSpans
    ) -> Trajectory:
        assert self._chat is not None, "episodes are sampled"
        continues = plan.env.continues_prompts and self._chat.rewriting is None
        with self._sampler(plan.task, plan.sampling, continues=continues) as sampler:
            calls = InstrumentedEpisode(
                plan.task.kind,
                plan.tag,
                env=leased.runner,
                step_limiter=self.envs.step_limiter(plan.tag),
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
