"""Pool of envs, each leased to one episode at a time and reused if healthy."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from anyio import CapacityLimiter

from offbeat.envs.registry import held_out_config
from offbeat.services.messages.types import EpisodeKind
from offbeat.services.rollout.config import CustomEnv
from offbeat.services.rollout.envs.process_env import ProcessEnv
from offbeat.services.rollout.envs.runners import (
    EnvRunner,
    EnvSpec,
    EnvTraits,
    InlineEnv,
    ThreadEnv,
)
from offbeat.services.threads import DaemonThreads

Key = tuple[str, EpisodeKind]

_UNLIMITED = nullcontext()


class _BothLimiters(AbstractAsyncContextManager[None]):
    def __init__(self, first: CapacityLimiter, second: CapacityLimiter) -> None:
        self._first, self._second = first, second

    async def __aenter__(self) -> None:
        await self._first.acquire()
        try:
            await self._second.acquire()
        except BaseException:
            self._first.release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._second.release()
        self._first.release()


@dataclass(slots=True)
class LeasedEnv:
    key: Key
    runner: EnvRunner
    traits: EnvTraits


class EnvPool:
    def __init__(self, custom_envs: Mapping[str, CustomEnv], num_threads: int, num_workers: int = 1) -> None:
        """num_workers: sharers of a tag's limit."""
        self._envs = custom_envs
        self._threads = DaemonThreads(num_threads)
        self._num_threads = num_threads
        self._idle: defaultdict[Key, list[LeasedEnv]] = defaultdict(list)
        limits = {tag: env.max_env_step_concurrent for tag, env in custom_envs.items()}
        self._limits = {tag: limit for tag, limit in limits.items() if limit is not None}
        self._limiters = {tag: CapacityLimiter(limit) for tag, limit in self._limits.items()}
        self._lock = CapacityLimiter(1)
        self.share_with(num_workers)

    def share_with(self, num_workers: int) -> None:
        for tag, limit in self._limits.items():
            self._limiters[tag].total_tokens = max(1, limit // num_workers)

    @property
    def num_hung(self) -> int:
        return self._threads.num_hung

    @property
    def is_worn_out(self) -> bool:
        """Return whether hanging threads require a new process."""
        return self._threads.num_hung >= self._num_threads

    def step_limiter(self, tag: str) -> AbstractAsyncContextManager[Any]:
        """Return the limiter: `use_thread_lock`, and the share of `max_env_step_concurrent`."""
        limiter = self._limiters.get(tag)
        if not self._envs[tag].use_thread_lock:
            return limiter or _UNLIMITED
        return self._lock if limiter is None else _BothLimiters(limiter, self._lock)

    async def take(self, tag: str, kind: EpisodeKind) -> LeasedEnv:
        """Lease an env; evaluation uses the held-out split.

        Raises:
            EpisodeError: creation failed.
        """
        key = (tag, kind)
        if self._idle[key]:
            return self._idle[key].pop()
        runner = self._make(self._envs[tag], kind)
        try:
            async with self._lock_of(tag):
                return LeasedEnv(key, runner, await runner.start())
        except BaseException:
            await asyncio.shield(runner.close())
            raise

    async def find_seeds(self, tag: str, n: int, start: int) -> list[int]:
        """Return `n` seeds from `start` with distinct tasks of evaluation, repeated if too few; raises EpisodeError."""
        leased = await self.take(tag, EpisodeKind.EVAL)
        finished = False
        try:
            while True:
                async with self._lock_of(tag):
                    seeds = await leased.runner.search_seeds(n, start)
                if seeds is not None:
                    finished = True
                    return seeds
        finally:
            if not (finished and self.keep(leased)):
                await asyncio.shield(leased.runner.close())

    def keep(self, leased: LeasedEnv) -> bool:
        if leased.runner.healthy:
            self._idle[leased.key].append(leased)
        return leased.runner.healthy

    async def close(self) -> None:
        idle = [leased for envs in self._idle.values() for leased in envs]
        self._idle.clear()
        await asyncio.gather(*(leased.runner.close() for leased in idle))
        self._threads.close()

    def _lock_of(self, tag: str) -> AbstractAsyncContextManager[Any]:
        return self._lock if self._envs[tag].use_thread_lock else _UNLIMITED

    def _make(self, env: CustomEnv, kind: EpisodeKind) -> EnvRunner:
        config = env.env_config if kind is EpisodeKind.TRAIN else held_out_config(env.env_type, env.env_config)
        spec = EnvSpec(env.env_type, config, env.reset_timeout_s, env.step_timeout_s, env.memory_gib)
        match env.execution:
            case "inline":
                return InlineEnv(spec)
            case "thread":
                return ThreadEnv(spec, self._threads)
            case "process":
                return ProcessEnv(spec)
