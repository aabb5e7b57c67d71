"""Replica that holds requests until it serves the version that they need.

Invariants: requests enter the engine only under committed weights of at least `min_version`; the version of a
completion's first token holds for its prompt's KV cache; nothing is served after a failed update. No request waits for an
engine that sleeps: what is sampled of it is returned at once.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from offbeat.services.errors import GenerationError, RetryableError, RewoundError, WeightsError, WeightsRefusedError
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.engine import PolicyEngine
from offbeat.services.generation.metrics import Counts
from offbeat.services.log_format import log_fields_setter
from offbeat.services.messages.types import Completion, FinishReason, GenerateRequest, Manifest
from offbeat.services.telemetry import MetricRecord
from offbeat.services.weights.api import WeightSubscriber
from offbeat.services.weights.replica_reports import ReplicaLoad

logger = logging.getLogger(__name__)

FOLLOW_TIMEOUT_S = 30.0
"""Longest wait per call."""
RETRY_INTERVAL_S = 1.0
"""After failed fetches or calls."""
ABORT_INTERVAL_S = 0.05
"""Between attempts to abort requests, some of which may not have reached the engine before."""


class ReplicaStatus(TypedDict):
    replica_id: str
    version: int
    running: int
    """Unanswered, including `waiting`."""
    waiting: int
    broken: str
    """Empty if healthy."""


class GenerationReplica:
    def __init__(
        self, replica_id: str, engine: PolicyEngine, subscriber: WeightSubscriber, config: GenerationConfig
    ) -> None:
        self._replica_id = replica_id
        self._engine = engine
        self._subscriber = subscriber
        self._timeout_s = config.request_timeout_s
        self._update_timeout_s = config.update_timeout_s
        self._set_log_fields = log_fields_setter(is_shared=config.engine.max_loras > 1)
        self._keeps_cache = config.on_weight_update == "keep"
        self._version = -1
        self._updating = False
        self._asleep = False
        self._engine_free = asyncio.Lock()
        """Held during updates and sleep."""
        self._num_sampling = 0
        self._drained = asyncio.Event()
        self._broken = ""
        self._loading: tuple[int, float] | None = None
        self._refused = ""
        self._waiting = 0
        self._changed = asyncio.Condition()
        self._running: dict[str, asyncio.Task[Completion]] = {}
        self._counts = Counts(engine.session_counts().continued, engine.kv_load().preemptions)

    async def catch_up(self) -> None:
        """Load the newest version, if fetchable.

        Raises:
            GenerationError: loading failed.
        """
        async with self._engine_free:
            await self._load_newest("starting without weights")

    async def _load_newest(self, otherwise: str) -> None:
        try:
            manifest = await self._subscriber.newest()
            if manifest is not None:
                await self._take(manifest)
        except WeightsError as error:
            self._counts.refused_weights()
            logger.warning("%s: %s", otherwise, error)
        except RetryableError as error:
            logger.warning("%s: %s", otherwise, error)

    async def follow(self) -> None:
        """Load versions as announced, until cancelled.

        Raises:
            GenerationError: an update failed, or the served version did not survive; the replica is to be replaced.
        """
        while True:
            try:
                manifest = await self._subscriber.wait_newer(self._version, FOLLOW_TIMEOUT_S)
                if manifest is not None:
                    async with self._engine_free:
                        await self._take(manifest)
            except RewoundError as error:
                await self._take_out_of_service(str(error))
                raise GenerationError(self._broken) from error
            except WeightsError as error:
                # Nothing was touched: the old weights are whole and serve until newer ones can be read.
                self._counts.refused_weights()
                logger.warning("still serving version %d: %s", self._version, error)
                await asyncio.sleep(RETRY_INTERVAL_S)
            except RetryableError as error:
                logger.warning("still serving version %d: %s", self._version, error)
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _take(self, manifest: Manifest) -> None:
        """Load a version, unless a newer one was loaded while the engine was not free."""
        if manifest.version <= self._version:
            return
        async with self._subscriber.fetch(manifest) as path:
            self._loading = (manifest.version, time.time())
            try:
                await self.report()
                await self._load(path, manifest.version)
            except WeightsRefusedError as error:
                self._refused = str(error)
                raise
            finally:
                self._loading = None
            self._refused = ""
        await self.report()

    async def report(self) -> None:
        """Raise `RetryableError` while the broker does not answer."""
        loading, since = self._loading or (None, 0.0)
        kv = self._engine.kv_load()
        load = ReplicaLoad(
            len(self._running),
            self._waiting,
            loading,
            since,
            self._refused,
            kv_usage=kv.usage,
            kv_tokens=kv.tokens,
            preemptions=kv.preemptions,
            recent_preemptions=kv.recent_preemptions,
        )
        await self._subscriber.report(self._replica_id, self._version, load)

    async def _load(self, path: Path, version: int) -> None:
        try:
            async with asyncio.timeout(self._update_timeout_s):
                await self._engine.stage(path)
                self._updating = True
                times = await self._engine.load(path, version)
        except WeightsRefusedError:
            async with self._changed:
                self._updating = False
                self._changed.notify_all()
            raise
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not self._updating:
                raise  # nothing that serves was touched
            # The model may be half loaded. This replica is done; Serve puts a new one in its place.
            await self._take_out_of_service(
                f"version {version} could not be loaded: {str(error) or type(error).__name__}"
            )
            raise GenerationError(self._broken) from error
        async with self._changed:
            self._version = version
            self._updating = False
            self._changed.notify_all()
        self._set_log_fields(version=version)
        self._counts.loaded(times)
        logger.info("serves version %d; paused for %.1f ms", version, times.pause_s * 1000)

    async def _take_out_of_service(self, reason: str) -> None:
        logger.error("out of service: %s", reason)
        await self.retire(reason)

    async def sleep(self) -> None:
        """Return all requests with the tokens so far, then free the engine's devices.

        Raises:
            GenerationError: the engine failed; the replica is broken.
        """
        await self._engine_free.acquire()
        async with self._changed:
            self._asleep = True
            self._changed.notify_all()
        await self._call_engine(self._leave_devices(), "sleep")
        logger.info("asleep: the learner has its devices")

    async def _leave_devices(self) -> None:
        while self._num_sampling:
            self._drained.clear()
            await self._engine.abort(list(self._running))
            with suppress(TimeoutError):
                async with asyncio.timeout(ABORT_INTERVAL_S):
                    await self._drained.wait()
        await self._engine.sleep()

    async def wake(self) -> None:
        """Sample again, under the newest weights if they can be fetched. Raises `GenerationError` as `sleep`."""
        await self._call_engine(self._engine.wake(), "wake up")
        await self._load_newest(f"awake with version {self._version}")
        async with self._changed:
            self._asleep = False
            self._changed.notify_all()
        self._engine_free.release()
        logger.info("awake")

    async def _call_engine(self, call: Awaitable[None], name: str) -> None:
        try:
            async with asyncio.timeout(self._update_timeout_s):
                await call
        except Exception as error:
            await self._take_out_of_service(f"the engine did not {name}: {str(error) or type(error).__name__}")
            raise GenerationError(self._broken) from error

    async def settle(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._broken or not self._updating)

    async def retire(self, reason: str) -> None:
        """Stop serving; running requests raise `RetryableError(reason)`."""
        async with self._changed:
            self._broken = reason
            self._changed.notify_all()
        for task in self._running.values():
            task.cancel()

    async def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[list[Completion]]:
        """Yield completions as they finish, aborted ones when the engine goes to sleep; then end when it wakes.

        Raises:
            RetryableError: this replica no longer serves.
        """
        done: asyncio.Queue[asyncio.Task[Completion]] = asyncio.Queue()
        tasks = {self._start(request, done): request for request in requests}
        left, is_aborted = len(tasks), False
        try:
            while left:
                finished = [await done.get()]
                while not done.empty():
                    finished.append(done.get_nowait())
                completions = [self._result(task, tasks[task]) for task in finished]
                left -= len(completions)
                is_aborted |= any(each.finish_reason is FinishReason.ABORT for each in completions)
                yield completions
            if is_aborted:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._broken or not self._asleep)
        finally:
            for task in tasks:
                task.cancel()

    def _start(
        self, request: GenerateRequest, done: "asyncio.Queue[asyncio.Task[Completion]]"
    ) -> asyncio.Task[Completion]:
        task = asyncio.create_task(self._sample(request))
        self._running[request.request_id] = task

        def finish(task: asyncio.Task[Completion]) -> None:
            if self._running.get(request.request_id) is task:
                del self._running[request.request_id]
            done.put_nowait(task)

        task.add_done_callback(finish)
        return task

    def _result(self, task: asyncio.Task[Completion], request: GenerateRequest) -> Completion:
        if task.cancelled():
            if self._broken:
                raise RetryableError(self._broken)
            return Completion(request.request_id, error="aborted")
        completion = task.result()
        self._counts.completed(completion, len(request.prompt))
        return completion

    async def _sample(self, request: GenerateRequest) -> Completion:
        try:
            async with asyncio.timeout(self._timeout_s):
                while await self._serves(request.min_version):
                    version = self._version
                    completion = await self._call_generate(request, version)
                    if self._spans_update(completion, version):
                        self._counts.resampled()
                    elif completion.finish_reason is not FinishReason.ABORT:
                        return completion
                    elif self._asleep:
                        return replace(completion, replica_id=self._replica_id)
                    else:
                        raise RetryableError(f"request {request.request_id} was aborted")
                return Completion(request.request_id, finish_reason=FinishReason.ABORT, replica_id=self._replica_id)
        except TimeoutError:
            return Completion(request.request_id, error=f"no answer within {self._timeout_s} s")

    async def _call_generate(self, request: GenerateRequest, version: int) -> Completion:
        self._num_sampling += 1
        try:
            return await self._engine.generate(request, version)
        finally:
            self._num_sampling -= 1
            if self._asleep and not self._num_sampling:
                self._drained.set()

    def _spans_update(self, completion: Completion, version: int) -> bool:
        """Return whether an update fell between submission and first token, so that part of the prompt may have older
        weights.
        """
        return self._keeps_cache and bool(completion.versions) and completion.versions[0].version != version

    async def _serves(self, min_version: int) -> bool:
        """Wait for `min_version` and the end of an update; return False if the engine sleeps."""
        if not self._ready(min_version):
            self._waiting += 1
            try:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._broken or self._asleep or self._ready(min_version))
            finally:
                self._waiting -= 1
        if self._broken:
            raise RetryableError(self._broken)
        return not self._asleep

    def _ready(self, min_version: int) -> bool:
        is_busy = self._updating or self._asleep
        return not self._broken and not is_busy and self._version >= max(min_version, 0)

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if task := self._running.get(request_id):
                task.cancel()

    async def check_health(self) -> None:
        """Raise `RetryableError` if this replica must be replaced."""
        if self._broken:
            raise RetryableError(self._broken)
        await self._engine.check()

    def status(self) -> ReplicaStatus:
        return ReplicaStatus(
            replica_id=self._replica_id,
            version=self._version,
            running=len(self._running),
            waiting=self._waiting,
            broken=self._broken,
        )

    def take_metrics(self) -> MetricRecord:
        return self._counts.take(
            self._engine.session_counts(),
            self._engine.kv_load(),
            replica_id=self._replica_id,
            version=self._version,
            running=len(self._running),
            waiting=self._waiting,
        )
