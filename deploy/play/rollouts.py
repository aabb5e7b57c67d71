"""Concurrent episodes with a run's rules and tasks."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import structs

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.play.agents import TextSampler, make_random_agent
from offbeat.deploy.play.prompts import AnsweredRows, open_answered, open_rewards
from offbeat.deploy.play.replicas import ReplicaSampler
from offbeat.deploy.play.target import PlayTarget, build_target, remove_token_limits
from offbeat.envs import registry
from offbeat.envs.prompts import ROW_IMAGE
from offbeat.services.buffer.members import add_to
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.errors import EpisodeError
from offbeat.services.messages.types import (
    EpisodeKind,
    EpisodeTask,
    Sampling,
    Trajectory,
)
from offbeat.services.reward.sample import GroupMember
from offbeat.services.rollout.agents.episode import AgentRuntime, agent_slot, play_with_agent
from offbeat.services.rollout.envs.pool import EnvPool
from offbeat.services.rollout.envs.runners import (
    EnvTraits,
    Opening,
    StepResult,
    call_env,
    close_quietly,
    do_reset,
    do_step,
    read_traits,
    render_png,
)
from offbeat.services.rollout.episodes.episode import (
    EpisodePlan,
    PlayableEnv,
    Sample,
    play,
)
from offbeat.services.rollout.episodes.transcript import Transcript
from offbeat.services.rollout.rewards import EpisodeRewards
from offbeat.services.rollout.tasks import EvalTasks, Task, train_task

Progress = Callable[[int, int], None]
"""(episodes done, in total)."""


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """Episodes to play; raises ValueError for a number that can't be."""

    episodes: int
    group_size: int
    kind: EpisodeKind
    seed: int
    concurrency: int

    def __post_init__(self) -> None:
        for name in ("episodes", "group_size", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise ValueError(f"seed: expected at least 0, got {self.seed}")
        if self.episodes % self.group_size:
            raise ValueError(f"episodes ({self.episodes}) must be a multiple of group_size ({self.group_size})")


@dataclass(slots=True)
class EpisodeResult:
    trajectories: list[Trajectory] = field(default_factory=list[Trajectory])
    failures: Counter[str] = field(default_factory=Counter[str])
    last_errors: dict[str, EpisodeError] = field(default_factory=dict[str, EpisodeError])
    """By reason."""
    duration_s: float = 0.0

    def add_failure(self, error: EpisodeError) -> None:
        self.failures[error.reason] += 1
        self.last_errors[error.reason] = error

    def describe_failures(self) -> str:
        return ", ".join(f"{self.last_errors[reason]} ({count})" for reason, count in self.failures.most_common())


class _LocalEnv:
    def __init__(self, env: registry.TextEnv) -> None:
        self.env = env

    async def reset(self, seed: int) -> Opening:
        return call_env("reset_error", do_reset, self.env, seed)

    async def step(self, action: str) -> StepResult:
        return call_env("step_error", do_step, self.env, action)

    async def image(self) -> bytes:
        return call_env("image_error", render_png, self.env)


class _LimitedEnv:
    """A leased env within its tag's lock and limit."""

    def __init__(self, env: PlayableEnv, limiter: AbstractAsyncContextManager[Any]) -> None:
        self._env, self._limiter = env, limiter

    async def reset(self, seed: int) -> Opening:
        async with self._limiter:
            return await self._env.reset(seed)

    async def step(self, action: str) -> StepResult:
        async with self._limiter:
            return await self._env.step(action)

    async def image(self) -> bytes:
        async with self._limiter:
            return await self._env.image()


def build_tasks(config: RunConfig, request: EpisodeRequest, rows: AnsweredRows | None = None) -> list[Task]:
    """Return each episode's task, equal for `group_size` in a row; raises ValueError and EpisodeError."""
    if rows is not None:
        return [rows.task(request.kind, number, request.group_size) for number in range(request.episodes)]
    if request.kind is EpisodeKind.EVAL:
        manager = config.val_env_manager.model_copy(update={"group_size": request.group_size})
        tasks = EvalTasks(config.model_copy(update={"val_env_manager": manager}), request.seed)
        return [call_env("task_id_error", tasks.task, number) for number in range(request.episodes)]
    return [train_task(config, request.seed, number // request.group_size) for number in range(request.episodes)]


async def run_episodes(
    config: RunConfig,
    request: EpisodeRequest,
    chat: ChatFormat,
    sample: Sample | ReplicaSampler | None,
    progress: Progress,
    runtime: AgentRuntime | None = None,
    *,
    counts_tokens: bool = True,
) -> EpisodeResult:
    """sample: None for random answers. runtime: for external agents. counts_tokens: False if tokens of `chat` are not
    those of the model that answers, so that limits in tokens do not apply.
    """
    result, began = EpisodeResult(), time.monotonic()
    pool = EnvPool(config.custom_envs, min(request.concurrency, 32))
    rows = open_answered(config, request.seed)
    rewards = open_rewards(config, rows, chat, request.group_size)
    members: dict[int, dict[int, GroupMember]] = {}
    progress(0, request.episodes)
    remaining = enumerate(build_tasks(config, request, rows))

    def find_target(tag: str) -> PlayTarget:
        target = build_target(config, tag, request.kind)
        return target if counts_tokens and sample is not None else remove_token_limits(target)

    async def play_remaining() -> None:
        for number, task in remaining:
            await asyncio.sleep(0)  # random answers wait for nothing: let the loop handle an interrupt
            try:
                transcript = None if rewards is None else rewards.begin(task.tag)
                target = find_target(task.tag)
                with sample.episode() if isinstance(sample, ReplicaSampler) else nullcontext(sample) as answers:
                    played = await _play(request, number, task, target, chat, answers, pool, runtime, rows, transcript)
                if rewards is not None and transcript is not None:
                    played, member = await rewards.add(played, request.kind, transcript)
                    if member is not None:
                        members.setdefault(int(played.group_id), {})[played.index] = member
                result.trajectories.append(played)
            except EpisodeError as error:
                result.add_failure(error)
            progress(len(result.trajectories) + result.failures.total(), request.episodes)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(request.concurrency, request.episodes)):
                group.create_task(play_remaining())
        if rewards is not None:
            await asyncio.gather(*(_compare(rewards, number, each, result) for number, each in members.items()))
    finally:
        await pool.close()
        if rewards is not None:
            await rewards.close()
        if runtime is not None:
            await runtime.close()
    result.duration_s = time.monotonic() - began
    result.trajectories.sort(key=lambda trajectory: (int(trajectory.group_id), trajectory.index))
    return result


async def _compare(
    rewards: EpisodeRewards, number: int, members: Mapping[int, GroupMember], result: EpisodeResult
) -> None:
    """Add the rewards that compare a group's members, or fail these."""
    try:
        additions = dict(zip(members, await rewards.compare(list(members.values()), number), strict=True))
    except EpisodeError as error:
        additions = {}
        for _ in members:
            result.add_failure(error)
    of_group = [t for t in result.trajectories if t.group_id == str(number) and t.index in members]
    others = [t for t in result.trajectories if not any(t is each for each in of_group)]
    result.trajectories = [*others, *(add_to(t, additions[t.index]) for t in of_group if additions)]


async def _play(
    request: EpisodeRequest,
    number: int,
    task: Task,
    target: PlayTarget,
    chat: ChatFormat,
    sample: Sample | None,
    pool: EnvPool,
    runtime: AgentRuntime | None,
    rows: AnsweredRows | None,
    transcript: Transcript | None,
) -> Trajectory:
    group, member = divmod(number, request.group_size)
    sampling = Sampling(target.temperature, target.top_p, target.top_k, target.max_new_tokens, chat.stop_ids)
    episode = EpisodeTask(request.kind, str(group), group, member, 0, 0)
    plan = EpisodePlan(
        episode,
        task.tag,
        task.seed,
        target.env,
        target.sequence_length,
        sampling,
        True,
        "rollout",
        prompt=None if rows is None else await rows.prompts.read(request.kind, task.seed),
        prompt_length=target.prompt_length,
        transcript=transcript,
    )

    async def run(env: PlayableEnv, traits: EnvTraits, answers: Sample) -> Trajectory:
        try:
            async with agent_slot(runtime, plan.tag, plan.env), asyncio.timeout(target.env.episode_timeout_s):
                if runtime is not None and plan.env.agent_runner is not None:
                    return await play_with_agent(plan, plan.env.agent_runner, env, traits, answers, runtime)
                return _with_opening(await play(plan, env, traits, answers, chat), plan, chat)
        except TimeoutError:
            raise EpisodeError("episode_timeout", f"not finished in {target.env.episode_timeout_s:g} s") from None

    if sample is None:
        env_config = target.env.env_config
        held_out = (
            registry.held_out_config(target.env.env_type, env_config)
            if request.kind is EpisodeKind.EVAL
            else env_config
        )
        made = call_env("make_error", registry.make, target.env.env_type, held_out)
        try:
            agent = partial(call_env, "answer_error", make_random_agent(made, request.seed * 1_000_003 + number))
            return await run(_LocalEnv(made), read_traits(made), TextSampler(agent, chat))
        finally:
            close_quietly(made)
    lease = await pool.take(task.tag, request.kind)
    finished = False
    try:
        trajectory = await run(_LimitedEnv(lease.runner, pool.step_limiter(task.tag)), lease.traits, sample)
        finished = True
        return trajectory
    finally:
        if not (finished and pool.keep(lease)):
            await lease.runner.close()


def _with_opening(trajectory: Trajectory, plan: EpisodePlan, chat: ChatFormat) -> Trajectory:
    """Return a copy whose texts have the row's earlier messages, too, as its tokens have."""
    if not plan.opening:
        return trajectory
    has_images = plan.prompt is not None and plan.prompt.images
    opening = [text.replace(ROW_IMAGE, chat.image_tokens.mark) if has_images else text for text in plan.opening]
    system, *texts = trajectory.text
    return structs.replace(trajectory, text=(system, *opening, *texts))


def read_success(trajectory: Trajectory) -> bool | None:
    success = trajectory.metrics.get("success")
    return None if success is None else success > 0
