"""Plays FrozenLake episodes into a real buffer without an engine: answers, logprobs and versions are made up, by task alone.

The same group number gives the same trajectories whoever plays it, so two learners can be compared.
"""

import asyncio
from functools import partial
from pathlib import Path

import numpy as np
from redis.asyncio import Redis

from offbeat.deploy.config.run import RunConfig
from offbeat.envs import registry
from offbeat.services.buffer.worker_client import AsyncRolloutBuffer
from offbeat.services.chat.append_only import ChatFormat, load_chat_format
from offbeat.services.keys import RunKeys
from offbeat.services.messages.types import (
    EpisodeKind,
    EpisodeTask,
    Segment,
    StopReason,
    Trajectory,
    Turn,
    VersionSpan,
)
from offbeat.services.redis.connection import connect_async
from offbeat.services.retry import retry_until_answered
from offbeat.services.rollout.tasks import EvalTasks, Task, train_task

ANSWERS = ("Left", "Down", "Right", "Up")


def play(config: RunConfig, chat: ChatFormat, task: Task, spec: EpisodeTask, version: int) -> Trajectory:
    """One episode of random answers; every sampled token claims to be of `version` at logprob -1.4."""
    custom = config.custom_envs[task.tag]
    env = registry.make(custom.env_type, custom.env_config)
    rng = np.random.default_rng([task.seed, spec.index])
    observation, _ = env.reset(seed=task.seed)
    tokens = list(chat.first_prompt(env.system_prompt, observation))  # pyright: ignore[reportAttributeAccessIssue]
    turns: list[Turn] = []
    spans: list[VersionSpan] = []
    metrics: dict[str, float] = {}
    for turn in range(custom.max_steps):
        answer = str(rng.choice(ANSWERS))
        start = len(tokens)
        tokens += [*chat.encode(answer), chat.end_id]
        spans.append(VersionSpan(start, len(tokens), version))
        observation, reward, terminated, truncated, info = env.step(answer)
        turns.append(Turn(0, start, len(tokens), float(reward)))
        metrics = {"success": float(info["success"])}
        if terminated or truncated or turn + 1 == custom.max_steps:
            break
        tokens += chat.next_prompt(observation)
    mask = np.zeros(len(tokens), dtype=np.bool_)
    for span in spans:
        mask[span.start : span.end] = True
    logprobs = np.where(mask, np.float32(-1.4), np.float32(0.0)).astype(np.float32)
    segment = Segment(np.array(tokens, dtype=np.int32), mask, logprobs, tuple(spans))
    reason = StopReason.TERMINATED if terminated else StopReason.MAX_STEPS
    return Trajectory(
        spec.group_id, spec.index, spec.attempt, task.tag, task.seed, (segment,), tuple(turns), reason, metrics,
        text=("system", *(ANSWERS[:1] * 2)),
    )  # fmt: skip


async def play_forever(config: RunConfig, redis_url: str, model_folder: Path, stop: asyncio.Event) -> None:
    """Claim and play until `stop`, as a worker does: waiting for unpublished weights and for a restarted Redis to be
    reconciled.
    """
    redis = connect_async(redis_url, patience_s=240.0)
    buffer = AsyncRolloutBuffer(redis, config.exp_name)
    chat = load_chat_format(model_folder)
    evals = EvalTasks(config, config.seed)
    try:
        while not stop.is_set():
            await retry_until_answered(lambda: buffer.heartbeat("scripted"))
            specs = await retry_until_answered(lambda: buffer.claim("scripted", 64))
            for spec in specs:
                task = (
                    train_task(config, config.seed, spec.number)
                    if spec.kind is EpisodeKind.TRAIN
                    else evals.task(spec.number)
                )
                # What a replica would serve at least; the newest version would depend on timing
                played = play(config, chat, task, spec, spec.min_version)
                await retry_until_answered(partial(buffer.submit, "scripted", spec, played))
            if not specs:
                await buffer.wait_for_work("scripted", 0.2)
    finally:
        await redis.aclose()


async def published_version(redis: Redis, run_id: str) -> int:
    """-1 before version 0."""
    raw = await redis.hget(RunKeys(run_id).progress, "version")  # pyright: ignore[reportGeneralTypeIssues]
    return int(raw) if raw is not None else -1
