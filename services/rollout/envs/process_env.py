"""Env in a child process."""

from contextlib import suppress
from typing import cast

from offbeat.services.errors import EpisodeError
from offbeat.services.rollout.child_process import ChildProcess
from offbeat.services.rollout.envs.runners import EnvSpec, EnvTraits, Opening, StepResult

CLOSE_S = 2.0
"""Grace period before a kill."""


class ProcessEnv:
    def __init__(self, spec: EnvSpec, *, quiet: bool = False) -> None:
        """quiet: drop the env's output."""
        self._spec = spec
        self._child = ChildProcess("offbeat.services.rollout.envs.process_env_main", "env_crashed", quiet=quiet)

    @property
    def healthy(self) -> bool:
        return self._child.healthy

    @property
    def pid(self) -> int | None:
        return self._child.pid

    async def start(self) -> EnvTraits:
        spec = self._spec
        await self._child.start()
        arguments = (spec.env_type, dict(spec.env_config), round(spec.memory_gib * 2**30))
        return EnvTraits(*await self._child.ask("make", spec.reset_timeout_s, *arguments))

    async def search_seeds(self, n: int, start: int) -> list[int] | None:
        return cast(list[int] | None, await self._child.ask("task_id", self._spec.reset_timeout_s, n, start))

    async def reset(self, seed: int) -> Opening:
        return Opening(*await self._child.ask("reset", self._spec.reset_timeout_s, seed))

    async def step(self, action: str) -> StepResult:
        return StepResult(*await self._child.ask("step", self._spec.step_timeout_s, action))

    async def random_answer(self, seed: int) -> str:
        """Return a plausible answer to the last observation."""
        return str(await self._child.ask("random_answer", self._spec.step_timeout_s, seed))

    async def image(self) -> bytes:
        return bytes(await self._child.ask("image", self._spec.step_timeout_s))

    async def close(self) -> None:
        child = self._child
        try:
            if child.healthy and child.pid is not None and not child.is_busy:
                with suppress(EpisodeError):
                    await child.ask("close", CLOSE_S)
        finally:
            await child.kill()
