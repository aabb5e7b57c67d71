"""Runners of an env: inline, in a thread, or in a process.

Invariants: calls (except inline) end within their timeout; a failed or hung env is never reused; a process env leaves
no child.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import msgspec
import numpy as np
from pydantic import JsonValue

from offbeat.envs.registry import REWARD_ROW, SeedSearch, TextEnv, make
from offbeat.services.chat.vision import encode_png
from offbeat.services.errors import EpisodeError
from offbeat.services.messages.images import check_png
from offbeat.services.threads import DaemonThreads, HungError

logger = logging.getLogger(__name__)

T = TypeVar("T")

NUMBERS = (int, float, np.bool_, np.integer, np.floating)
"""Info values that become metrics."""


@dataclass(frozen=True, slots=True)
class EnvSpec:
    env_type: str
    env_config: Mapping[str, JsonValue]
    reset_timeout_s: float
    """Includes creation."""
    step_timeout_s: float
    memory_gib: float = 4.0


class EnvTraits(NamedTuple):
    system_prompt: str
    metrics_agg_mode: dict[str, str]
    functions: Sequence[Mapping[str, Any]] = ()
    """Functions for the policy, in OpenAI's form."""
    seats: Sequence[str] = ()
    """Seats that the policy plays, if several."""
    tool_instructions: str = ""
    """Part of the system prompt that a row's system message does not replace."""


class Opening(NamedTuple):
    observation: str
    seat: str = ""
    """Seat to move."""
    row: Mapping[str, Any] = {}
    """What rewards may know of the task (`info["reward_row"]`)."""


class StepResult(NamedTuple):
    observation: str
    """For the seat to move."""
    reward: float
    terminated: bool
    truncated: bool
    metrics: dict[str, float]
    seat: str = ""
    """Seat to move."""
    seats: Mapping[str, Mapping[str, float]] = {}
    """By seat: its `reward` of this step, and metrics."""
    row: Mapping[str, Any] = {}
    """As of `Opening`; adds to it."""


class EnvRunner(Protocol):
    """Interface to an env; one caller at a time; all methods but `close` may raise EpisodeError."""

    @property
    def healthy(self) -> bool: ...

    async def start(self) -> EnvTraits: ...

    async def search_seeds(self, n: int, start: int) -> list[int] | None:
        """Return `n` seeds from `start` with distinct tasks; None: call again."""
        ...

    async def reset(self, seed: int) -> Opening: ...

    async def step(self, action: str) -> StepResult: ...

    async def image(self) -> bytes: ...

    async def close(self) -> None:
        """Close the env, even if busy."""
        ...


def read_traits(env: TextEnv) -> EnvTraits:
    inner = env.unwrapped
    modes: Mapping[str, str] = getattr(inner, "metrics_agg_mode", {})
    functions: Sequence[Mapping[str, Any]] = getattr(inner, "functions", ())
    prompt = str(getattr(inner, "system_prompt", None) or "")
    tools = str(getattr(inner, "tool_instructions", None) or "")
    return EnvTraits(prompt, dict(modes), tuple(dict(each) for each in functions), read_seats(env), tools)


def read_seats(env: TextEnv) -> tuple[str, ...]:
    return tuple(getattr(env.unwrapped, "seats", ()))


def do_reset(env: TextEnv, seed: int) -> Opening:
    """Reset; raise TypeError or ValueError unless the observation is text, and the row plain."""
    observation, info = env.reset(seed=seed)
    seat = str(info.get("seat", "")) if read_seats(env) else ""
    return Opening(_text(observation), seat, _read_row(info))


def do_step(env: TextEnv, action: str) -> StepResult:
    """Step, check, and reduce info to metrics.

    Raises:
        TypeError: the observation is not text, or the row not plain.
        ValueError: it has half of a surrogate pair, or a reward is not finite.
    """
    observation, reward, terminated, truncated, info = env.step(action)
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"the env's reward is {value}")
    if not read_seats(env):
        numbers, row = _numbers(info), _read_row(info)
        return StepResult(_text(observation), value, bool(terminated), bool(truncated), numbers, row=row)
    seats = {str(seat): _numbers(values) for seat, values in info.get("seats", {}).items()}
    if bad := [seat for seat, values in seats.items() if not math.isfinite(values.get("reward", 0.0))]:
        raise ValueError(f"the env's reward of seat {bad[0]} is {seats[bad[0]]['reward']}")
    seat = str(info.get("seat", ""))
    return StepResult(_text(observation), value, bool(terminated), bool(truncated), _numbers(info), seat, seats)


def _numbers(info: Mapping[str, Any]) -> dict[str, float]:
    return {str(k): float(v) for k, v in info.items() if isinstance(v, NUMBERS)}


def _read_row(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what rewards may know of the task, as builtins; raises TypeError."""
    row = info.get(REWARD_ROW)
    if row is None:
        return {}
    if not isinstance(row, Mapping):
        raise TypeError(f"info[{REWARD_ROW!r}] is a {type(row).__name__}, not a mapping")
    return cast(Mapping[str, Any], msgspec.to_builtins(row, builtin_types=(bytes,), str_keys=True, enc_hook=_to_list))


def _to_list(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"info[{REWARD_ROW!r}] has a {type(value).__name__}: use texts, numbers, lists and mappings")


def render_png(env: TextEnv) -> bytes:
    """Render a PNG.

    Raises:
        ValueError: no `rgb_array`, or too large.
    """
    frame = env.render()
    if not isinstance(frame, np.ndarray):
        raise ValueError("the env renders no image: make it with render_mode rgb_array")
    png = encode_png(frame)
    check_png(png)
    return png


def _text(observation: object) -> str:
    if not isinstance(observation, str):
        raise TypeError(f"the env's observation is a {type(observation).__name__}: only text is supported")
    try:
        observation.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the env's observation has half of a surrogate pair: decode texts with errors='replace': {error}"
        ) from error
    return observation


def call_env(reason: str, function: Callable[..., T], *args: Any) -> T:
    """Call an env's code; raise EpisodeError for all exceptions, including SystemExit."""
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        logger.warning("%s", reason, exc_info=True)
        raise EpisodeError(reason, f"{type(error).__name__}: {error}") from error


class InlineEnv:
    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec
        self._env: TextEnv | None = None
        self._search: SeedSearch | None = None
        self.healthy = True

    async def start(self) -> EnvTraits:
        self._env = self._run_checked("make_error", make, self._spec.env_type, self._spec.env_config)
        self._search = SeedSearch(self._env)
        return read_traits(self._env)

    async def search_seeds(self, n: int, start: int) -> list[int] | None:
        assert self._search is not None, "call start() first"
        return await asyncio.to_thread(self._run_checked, "task_id_error", self._search.run, n, start)

    async def reset(self, seed: int) -> Opening:
        return self._run_checked("reset_error", do_reset, self._env, seed)

    async def step(self, action: str) -> StepResult:
        return self._run_checked("step_error", do_step, self._env, action)

    async def image(self) -> bytes:
        return self._run_checked("image_error", render_png, self._env)

    async def close(self) -> None:
        self.healthy = False
        if self._env is not None:
            close_quietly(self._env)

    def _run_checked(self, reason: str, function: Callable[..., T], *args: Any) -> T:
        try:
            return call_env(reason, function, *args)
        except EpisodeError:
            self.healthy = False
            raise


class ThreadEnv:
    """Env in the worker's threads, one call at a time; a hung call is abandoned."""

    def __init__(self, spec: EnvSpec, threads: DaemonThreads) -> None:
        self._spec = spec
        self._threads = threads
        self._env: TextEnv | None = None
        self._search: SeedSearch | None = None
        self._flags = threading.Lock()
        self._busy = False
        self._closing = False
        self.healthy = True

    async def start(self) -> EnvTraits:
        spec = self._spec
        return await self._run("make", spec.reset_timeout_s, self._make)

    async def search_seeds(self, n: int, start: int) -> list[int] | None:
        search = self._search
        assert search is not None, "call start() first"
        return await self._run("task_id", self._spec.reset_timeout_s, lambda: search.run(n, start))

    async def reset(self, seed: int) -> Opening:
        return await self._run("reset", self._spec.reset_timeout_s, lambda: do_reset(self._started, seed))

    async def step(self, action: str) -> StepResult:
        return await self._run("step", self._spec.step_timeout_s, lambda: do_step(self._started, action))

    async def image(self) -> bytes:
        return await self._run("image", self._spec.step_timeout_s, lambda: render_png(self._started))

    async def close(self) -> None:
        self.healthy = False
        with self._flags:
            self._closing = True
            env = None if self._busy else self._env
        if env is not None:
            try:
                await self._threads.run(lambda: close_quietly(env), self._spec.reset_timeout_s)
            except HungError:
                logger.warning("an env of type %s hung while it was closed", self._spec.env_type)

    @property
    def _started(self) -> TextEnv:
        assert self._env is not None, "call start() first"
        return self._env

    def _make(self) -> EnvTraits:
        self._env = make(self._spec.env_type, self._spec.env_config)
        self._search = SeedSearch(self._env)
        return read_traits(self._env)

    async def _run(self, operation: str, timeout_s: float, function: Callable[[], T]) -> T:
        def call() -> T:
            try:
                return call_env(f"{operation}_error", function)
            finally:
                with self._flags:
                    self._busy = False
                    orphan = self._env if self._closing else None
                if orphan is not None:
                    close_quietly(orphan)

        def on_start() -> None:
            self._busy = True

        try:
            return await self._threads.run(call, timeout_s, on_start)
        except HungError:
            self.healthy = False
            raise EpisodeError(f"{operation}_timeout", f"no answer in {timeout_s:g} s") from None
        except EpisodeError:
            self.healthy = False
            raise


def close_quietly(env: TextEnv) -> None:
    try:
        env.close()
    except (Exception, SystemExit):
        logger.warning("an env failed while it was closed", exc_info=True)
