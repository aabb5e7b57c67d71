"""Fakes of an env worker's services, and faulty envs."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
from gymnasium.spaces import Text

from offbeat.services.awake_clock import AwakeClock
from offbeat.services.buffer.api import ClaimLimits, SubmitResult, WorkerOrders
from offbeat.services.errors import RetryableError
from offbeat.services.generation.routing import Unrouted
from offbeat.services.messages.types import (
    Completion,
    EpisodeKind,
    EpisodeTask,
    FinishReason,
    GenerateRequest,
    Trajectory,
    VersionSpan,
)
from offbeat.services.rollout.config import (
    CustomEnv,
    EnvManagerConfig,
    RolloutConfig,
    WorkerSettings,
)
from offbeat.services.telemetry import MetricRecord

HERE = f"{__name__}:"


def worker_settings(folder: Path, **changes: Any) -> WorkerSettings:
    """Settings of a worker that plays FrozenLake inline with the tiny policy of `folder`."""
    lake = CustomEnv(env_type="frozen_lake", max_steps=12, max_tokens_per_step=4, execution="inline")
    values: dict[str, Any] = {
        "run_id": "run",
        "seed": 7,
        "model_folder": folder,
        "output_dir": folder,
        "redis_url": "redis://nowhere",
        "sequence_length": 512,
        "custom_envs": {"Lake": lake},
        "train_env_manager": EnvManagerConfig(group_size=4),
        "val_env_manager": EnvManagerConfig(group_size=1),
        "rollout": RolloutConfig(max_env_num_per_worker=16),
        "generation_app": "generation-run",
        "request_timeout_s": 5.0,
        "worker_timeout_s": 0.25,
    }
    return WorkerSettings(**{**values, **changes})


def train_episode(number: int, index: int = 0, attempt: int = 0) -> EpisodeTask:
    return EpisodeTask(EpisodeKind.TRAIN, f"run-{number}", number, index, attempt, min_version=0)


class FakeBuffer:
    """Assigns episodes from a list and keeps submissions; while `down` is set, every call fails."""

    def __init__(self, tasks: Sequence[EpisodeTask] = ()) -> None:
        self.queue = list(tasks)
        self.submitted: dict[EpisodeTask, Trajectory] = {}
        self.failed: list[tuple[EpisodeTask, str]] = []
        self.claimed: list[EpisodeTask] = []
        self.to_cancel: list[EpisodeTask] = []
        self.draining = False
        self.down = False
        self.released = 0
        self.heartbeats = 0
        self.refused = 0
        """Calls that came while it was down."""
        self.retries = False
        """Whether a failed episode is queued again with the next attempt."""
        self.drawn: dict[int, str] = {}
        self.sampler_state = ""
        self._bell = asyncio.Event()

    def offer(self, *tasks: EpisodeTask) -> None:
        self.queue += tasks
        self._bell.set()

    async def task(self, number: int, drawn: str = "") -> tuple[str, str]:
        self._answer("")
        if drawn:
            self.drawn.setdefault(number, drawn)
        return self.drawn.get(number, ""), self.sampler_state

    async def claim(self, worker_id: str, limit: int, of_kind: ClaimLimits | None = None) -> list[EpisodeTask]:
        self._answer(worker_id)
        if self.draining:
            return []
        train, evaluation = of_kind or ClaimLimits(limit, limit)
        left, given = {EpisodeKind.TRAIN: train, EpisodeKind.EVAL: evaluation}, list[EpisodeTask]()
        for task in self.queue:
            if len(given) < limit and left[task.kind]:
                left[task.kind] -= 1
                given.append(task)
        self.queue = [task for task in self.queue if task not in given]
        self.claimed += given
        return given

    async def wait_for_work(self, worker_id: str, timeout_s: float) -> bool:
        self._answer(worker_id)
        self._bell.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._bell.wait()
        except TimeoutError:
            return False
        return True

    async def heartbeat(self, worker_id: str) -> WorkerOrders:
        self._answer(worker_id)
        self.heartbeats += 1
        cancelled, self.to_cancel = tuple(self.to_cancel), []
        return WorkerOrders(cancelled, self.draining)

    async def submit(
        self, worker_id: str, task: EpisodeTask, trajectory: Trajectory, sample: bytes = b""
    ) -> SubmitResult:
        self._answer(worker_id)
        assert not sample, "groups that are compared need the real buffer"
        if task in self.submitted:
            return SubmitResult.DUPLICATE
        self.submitted[task] = trajectory
        return SubmitResult.ACCEPTED

    async def fail(self, worker_id: str, task: EpisodeTask, reason: str) -> None:
        self._answer(worker_id)
        self.failed.append((task, reason))
        if self.retries:
            again = EpisodeTask(task.kind, task.group_id, task.number, task.index, task.attempt + 1, task.min_version)
            self.offer(again)

    async def release(self, worker_id: str) -> int:
        self._answer(worker_id)
        self.released += 1
        return 0

    def _answer(self, _: str) -> None:
        if self.down:
            self.refused += 1
            raise RetryableError("down")


class FakeMetrics:
    def __init__(self) -> None:
        self.records: list[MetricRecord] = []

    async def append(self, record: MetricRecord) -> None:
        self.records.append(record)


Answer = Callable[[GenerateRequest], tuple[int, ...]]


class FakeGeneration(Unrouted):
    """Answers each turn by `answer`, after `delay_s(request)`; `errors` are raised first, one per call."""

    def __init__(self, answer: Answer, delay_s: Callable[[GenerateRequest], float] | None = None) -> None:
        self.answer = answer
        self.delay_s = delay_s or (lambda _: 0.0)
        self.errors: list[Exception] = []
        self.calls: list[list[GenerateRequest]] = []
        self.aborted: list[str] = []
        self.version = 3
        self.clock = AwakeClock()

    async def generate(
        self, requests: Sequence[GenerateRequest], replica_id: str = ""
    ) -> AsyncIterator[list[Completion]]:
        del replica_id
        self.calls.append(list(requests))
        if self.errors:
            raise self.errors.pop(0)
        by_delay: dict[float, list[GenerateRequest]] = {}
        for request in requests:
            by_delay.setdefault(self.delay_s(request), []).append(request)
        waited = 0.0
        for delay in sorted(by_delay):
            await asyncio.sleep(delay - waited)
            waited = delay
            yield [self._complete(request) for request in by_delay[delay]]

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids

    def _complete(self, request: GenerateRequest) -> Completion:
        ids = self.answer(request)[: request.sampling.max_new_tokens]
        finish = FinishReason.STOP if ids[-1] in request.sampling.stop_token_ids else FinishReason.LENGTH
        spans = (VersionSpan(0, len(ids), self.version),)
        return Completion(request.request_id, ids, tuple(-0.5 for _ in ids), spans, finish)


class CountingEnv(gymnasium.Env[str, str]):
    """Counts its steps; ends after `length`; its observations name the seed."""

    system_prompt = "Walk P to G ."
    words = ("P", "G", "_", "Walk", "to", ".", *map(str, range(10)))
    observation_space = Text(100)
    action_space = Text(100)
    metrics_agg_mode = {"total": "sum", "first_step": "first", "highest": "max"}  # noqa: RUF012

    def __init__(self, length: int = 3, split: str = "train") -> None:
        self.length, self.split, self._step = length, split, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._step = 0
        return f"P {int(self.np_random.integers(10))}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._step += 1
        n = self._step
        info = {
            "total": n,
            "first_step": n,
            "highest": n,
            "action_is_valid": n == 1,
            "success": n == self.length,
            "text": action,
        }
        return f"_ {n % 10}", 0.5, n >= self.length, False, info


class SlowTasksEnv(CountingEnv):
    """Blocks in `task_id` until `marker` exists; gives up after thirty seconds and writes so to `marker`."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.marker, self._until = Path(marker), time.monotonic() + 30.0

    def task_id(self, seed: int) -> int:
        while not self.marker.exists() and time.monotonic() < self._until:
            time.sleep(0.01)
        if not self.marker.exists():
            self.marker.write_text("gave up")
        return seed


NO_TEXTS: dict[str, Any] = {"no_text": 3, "no_utf8": "half of a pair: \ud83d"}


class BadEnv(CountingEnv):
    """Fails at its second step (or at `when`) in the way `how`, unless `marker` exists."""

    def __init__(self, how: str, when: str = "step", marker: str = "") -> None:
        super().__init__()
        self.how, self.when, self.marker = how, when, marker
        if when == "make":
            self._misbehave()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        if self.when == "reset":
            self._misbehave()
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.when == "step" and self._step == 1:
            self._misbehave()
        observation, reward, *rest = super().step(action)
        if self.how == "nan":
            reward = float("nan")
        if self.how in NO_TEXTS:
            observation = NO_TEXTS[self.how]
        return observation, reward, *rest  # pyright: ignore[reportReturnType]

    def _misbehave(self) -> None:
        if self.marker:
            try:
                Path(self.marker).touch(exist_ok=False)  # of envs in several processes one
            except FileExistsError:
                return
        match self.how:
            case "raise":
                raise RuntimeError("broken")
            case "surrogate":
                raise RuntimeError("broken: \ud83d")
            case "stop_iteration":
                raise StopIteration
            case "exit":
                sys.exit(3)
            case "crash":
                os._exit(7)
            case "hang":
                time.sleep(1000)
            case "hang_with_child":
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
                Path(self.marker).write_text(str(child.pid))
                time.sleep(1000)
            case "leave_daemon":
                child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
                Path(self.marker).write_text(str(child.pid))
                raise RuntimeError("broken")
            case "print":
                print("noise on stdout", flush=True)  # noqa: T201
            case _:
                pass


class Crowd(CountingEnv):
    """Reports how many instances were in a step or constructor at once; each of these waits for a second one."""

    metrics_agg_mode = {"inside": "max"}  # noqa: RUF012
    door = threading.Condition()
    inside = 0
    entered = 0

    def __init__(self, *, waits_when_made: bool = False) -> None:
        super().__init__()
        self._largest = self._meet() if waits_when_made else 0

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._largest = max(self._largest, self._meet())
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {**info, "inside": self._largest}

    def _meet(self) -> int:
        with Crowd.door:
            Crowd.inside += 1
            Crowd.entered += 1
            Crowd.door.notify_all()
            mine, largest = Crowd.entered, Crowd.inside
            Crowd.door.wait_for(lambda: Crowd.inside > 1 or Crowd.entered > mine, timeout=2.0)
            largest = max(largest, Crowd.inside)
            Crowd.inside -= 1
        return largest


class WaitingEnv(CountingEnv):
    """Waits in each step for a gate file."""

    def __init__(self, wait_s: float = 0.05, gate: str = "") -> None:
        super().__init__()
        self.wait_s, self.gate = wait_s, gate
        self.closed = False

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.gate:
            Path(self.gate + ".waits").touch()
        while self.gate and not Path(self.gate).exists():
            time.sleep(0.005)
        time.sleep(self.wait_s)
        return super().step(action)

    def close(self) -> None:
        if self.gate:
            Path(self.gate + ".closed").touch()


class SeatsEnv(gymnasium.Env):
    """A game of three seats, who move in this order; a move gives its seat 1, and the end of the game each its own."""

    system_prompt = "Go"
    seats = ("a", "b", "c")
    SEES: ClassVar = {"a": "P", "b": "G", "c": "O"}
    LAST: ClassVar = {"a": 10.0, "b": 20.0, "c": 30.0}

    def __init__(self, order: str = "baba") -> None:
        self._order = order

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._moves = 0
        return self._next()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        del action
        mover = self._order[self._moves]
        self._moves += 1
        is_over = self._moves == len(self._order)
        rewards = {name: (name == mover) + (self.LAST[name] if is_over else 0.0) for name in self.seats}
        seats = {name: {"reward": reward, "success": reward > 20} for name, reward in rewards.items()}
        observation, info = ("", {}) if is_over else self._next()
        return observation, sum(rewards.values()), is_over, False, {**info, "seats": seats}

    def _next(self) -> tuple[str, dict[str, Any]]:
        seat = self._order[self._moves]
        return self.SEES.get(seat, "?"), {"seat": seat}
