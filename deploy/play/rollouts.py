"""Runs many episodes of a run's tags, with its rules and tasks, and collects the results."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import comb

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.play.agents import SpokenAnswers, random_speaker
from offbeat.deploy.play.target import target_of, unbounded
from offbeat.envs import registry
from offbeat.services.chat.append_only import ChatFormat
from offbeat.services.errors import EpisodeError
from offbeat.services.messages.types import (
    EpisodeKind,
    EpisodeTask,
    Sampling,
    Trajectory,
)
from offbeat.services.rollout.agents.episode import AgentRuntime, play_with_agent
from offbeat.services.rollout.envs.pool import EnvPool
from offbeat.services.rollout.envs.runners import (
    EnvTraits,
    StepResult,
    do_picture,
    do_reset,
    do_step,
    traits_of,
)
from offbeat.services.rollout.episodes.episode import (
    EpisodePlan,
    PlayableEnv,
    Sample,
    play,
)
from offbeat.services.rollout.tasks import EvalTasks, Task, train_task

Progress = Callable[[int, int], None]
"""(episodes done, episodes in all)."""


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """Episodes to run."""

    episodes: int
    group_size: int
    kind: EpisodeKind
    seed: int
    concurrency: int


@dataclass(slots=True)
class EpisodeResult:
    """Results of the episodes."""

    trajectories: list[Trajectory] = field(default_factory=list[Trajectory])
    failures: Counter[str] = field(default_factory=Counter[str])
    """Number of failed episodes by reason."""


class _LocalEnv:
    """Env on the event loop that also serves the random agent, which needs the env's answers."""

    def __init__(self, env: registry.TextEnv) -> None:
        self.env = env

    async def reset(self, seed: int) -> str:
        return do_reset(self.env, seed)

    async def step(self, action: str) -> StepResult:
        return do_step(self.env, action)

    async def picture(self) -> bytes:
        return do_picture(self.env)


def tasks_of(config: RunConfig, order: EpisodeRequest) -> list[Task]:
    """Return the task of each episode: those of an evaluation, or of training's first groups; `group_size` in a row
    share one."""
    if order.kind is EpisodeKind.EVAL:
        manager = config.val_env_manager.model_copy(update={"group_size": order.group_size})
        tasks = EvalTasks(config.model_copy(update={"val_env_manager": manager}), order.seed)
        return [tasks.task(number) for number in range(order.episodes)]
    return [train_task(config, order.seed, number // order.group_size) for number in range(order.episodes)]


async def play_many(
    config: RunConfig,
    order: EpisodeRequest,
    chat: ChatFormat,
    sample: Sample | None,
    progress: Progress,
    desk: AgentRuntime | None = None,
) -> EpisodeResult:
    """Run all requested episodes. sample: None for random answers. desk: runtime of tags with `played_by: agent`."""
    played, room = EpisodeResult(), asyncio.Semaphore(order.concurrency)
    pool = EnvPool(config.custom_envs, min(order.concurrency, 32))
    tasks = tasks_of(config, order)

    async def one(number: int, task: Task) -> None:
        async with room:
            try:
                played.trajectories.append(await _play(config, order, number, task, chat, sample, pool, desk))
            except EpisodeError as error:
                played.failures[error.reason] += 1
        progress(len(played.trajectories) + played.failures.total(), order.episodes)

    try:
        async with asyncio.TaskGroup() as group:
            for number, task in enumerate(tasks):
                group.create_task(one(number, task))
    finally:
        await pool.close()
        if desk is not None:
            await desk.close()
    played.trajectories.sort(key=lambda trajectory: (int(trajectory.group_id), trajectory.index))
    return played


async def _play(
    config: RunConfig,
    order: EpisodeRequest,
    number: int,
    task: Task,
    chat: ChatFormat,
    sample: Sample | None,
    pool: EnvPool,
    desk: AgentRuntime | None,
) -> Trajectory:
    setting = target_of(config, task.tag)
    if sample is None:
        setting = unbounded(setting)
    group, member = divmod(number, order.group_size)
    sampling = Sampling(setting.temperature, setting.top_p, setting.top_k, setting.max_new_tokens, chat.stop_ids)
    episode = EpisodeTask(order.kind, str(group), group, member, 0, 0)
    plan = EpisodePlan(episode, task.tag, task.seed, setting.env, setting.sequence_length, sampling, True, "rollout")

    async def run(env: PlayableEnv, traits: EnvTraits, answers: Sample) -> Trajectory:
        try:
            async with asyncio.timeout(setting.env.episode_timeout_s):
                if sample is not None and desk is not None and plan.env.agent_runner is not None:
                    return await play_with_agent(plan, plan.env.agent_runner, env, traits, answers, desk)
                return await play(plan, env, traits, answers, chat)
        except TimeoutError:
            raise EpisodeError("episode_timeout", f"not over in {setting.env.episode_timeout_s:g} s") from None

    if sample is None:
        own = setting.env.env_config
        held_out = registry.held_out_config(setting.env.env_type, own) if order.kind is EpisodeKind.EVAL else own
        env = _LocalEnv(registry.make(setting.env.env_type, held_out))
        speaker = random_speaker(env.env, order.seed * 1_000_003 + number)
        return await run(env, traits_of(env.env), SpokenAnswers(speaker, chat))
    lent = await pool.take(task.tag, order.kind)
    finished = False
    try:
        trajectory = await run(lent.runner, lent.traits, sample)
        finished = True
        return trajectory
    finally:
        if not (finished and pool.keep(lent)):
            await lent.runner.close()


def succeeded(trajectory: Trajectory) -> bool | None:
    """Return True if the task succeeded; None if the env reports no `success`."""
    success = trajectory.metrics.get("success")
    return None if success is None else success > 0


def pass_at_k(groups: Sequence[Sequence[bool]], k: int) -> float:
    """Return chance that one of `k` episodes of a group succeeds, mean over groups: 1 - C(n-c, k) / C(n, k), unbiased
    (arXiv:2107.03374).

    Raises:
        ValueError: a group has fewer than `k` episodes.
    """
    if not groups or any(len(group) < k for group in groups):
        raise ValueError(f"pass@{k} needs groups of {k} episodes at least")
    return sum(1 - comb(len(group) - sum(group), k) / comb(len(group), k) for group in groups) / len(groups)
