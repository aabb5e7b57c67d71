"""Several engines that sample one policy, each in a process of its own on its own devices.

Invariants: an episode's turns go to one engine, which has its keys and values; the processes and what they have started end
with the context.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any, cast

import msgspec
import psutil

from offbeat.deploy.play.engine import EngineSampler, sampling_of, show_printed
from offbeat.deploy.play.policy import parse_version
from offbeat.deploy.play.replica_main import LENGTH_BYTES, SOCKETS, STARTED, EngineOrder, EngineReply, TurnOrder, pack
from offbeat.deploy.play.target import PlayTarget
from offbeat.services.devices import VISIBLE, visible_devices
from offbeat.services.errors import CodecError, GenerationError, RetryableError
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.messages.codec import decode_completions, encode_requests
from offbeat.services.messages.types import Completion, GenerateRequest

MODULE = "offbeat.deploy.play.replica_main"
CLOSE_TIMEOUT_S = 10.0
"""Time for an engine that runs to end by itself; SGLang's server takes up to five seconds."""
START_CLOSE_TIMEOUT_S = 3.0
"""The same while it starts."""
POLL_INTERVAL_S = 0.05


class EngineProcess(asyncio.SubprocessProtocol):
    """Process of an engine; raises `RetryableError` for each turn once it has ended."""

    def __init__(self, name: str, printed: IO[bytes]) -> None:
        """name: in errors. printed: for the process's standard streams."""
        self._name = name
        self._printed = printed
        self._transport: asyncio.SubprocessTransport | None = None
        self._pid = 0
        self._received = bytearray()
        self._answers: dict[int, asyncio.Future[Completion]] = {}
        self._number = STARTED
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._exited = asyncio.Event()
        self._end = ""
        """How the process has ended."""
        self._has_closed = False
        self.shows_output = False
        """Whether what the process printed may say why it failed."""

    async def start(self, order: EngineOrder, environment: dict[str, str]) -> None:
        """Raise GenerationError if the engine does not start."""
        loop = asyncio.get_running_loop()
        path = os.pathsep.join(each for each in sys.path if each)
        opening = loop.subprocess_exec(
            lambda: self,
            *(sys.executable, "-m", MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._printed,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        try:
            await opening
        except OSError as error:
            raise GenerationError(f"{self._name}: it did not start: {error}") from error
        self._send(pack(order))
        await self._started

    async def generate(self, request: GenerateRequest, version: int) -> Completion:
        """Sample one turn under the version of the order; as `PolicyEngine`."""
        del version
        if self._end or self._is_closing:
            raise RetryableError(f"{self._name}: {self._end or 'the engine process has ended'}")
        self._number += 1
        number, answer = self._number, asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._send(pack(TurnOrder(number, encode_requests([request]))))
        try:
            return await answer
        except asyncio.CancelledError:
            if not self._is_closing:
                self._send(pack(TurnOrder(number)))
            raise
        finally:
            del self._answers[number]

    async def close(self) -> None:
        """End the process, and what it has started."""
        self._has_closed = True
        if self._transport is None:
            return
        if self.has_ended:
            self._transport.close()
            return
        stdin = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))
        if not stdin.is_closing():
            stdin.abort()  # `close` waits until all is written
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S if self._has_started else START_CLOSE_TIMEOUT_S):
                while any(find_members(self._pid)):  # noqa: ASYNC110 - other processes set no event
                    await asyncio.sleep(POLL_INTERVAL_S)
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        await self._exited.wait()
        self._transport.close()

    @property
    def has_ended(self) -> bool:
        return self._exited.is_set()

    @property
    def _is_closing(self) -> bool:
        """Whether nothing more reaches the process: asyncio would log each attempt."""
        return self._transport is None or cast(Any, self._transport.get_pipe_transport(0)).is_closing()

    @property
    def _has_started(self) -> bool:
        return self._started.done() and not self._started.cancelled() and self._started.exception() is None

    def show(self) -> None:
        """Write what the process printed to standard error."""
        show_printed(self._printed)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self._pid = self._transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        del fd
        assert isinstance(data, bytes)
        self._received += data
        while len(self._received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._received[:LENGTH_BYTES], "little")
            if len(self._received) < end:
                return
            body = bytes(self._received[LENGTH_BYTES:end])
            del self._received[:end]
            self._take(msgspec.msgpack.decode(body, type=EngineReply))

    def process_exited(self) -> None:
        assert self._transport is not None
        status = self._transport.get_returncode()
        how = f"signal {-status}" if status is not None and status < 0 else f"exit code {status}"
        self._end = f"the engine's process ended with {how}"
        self._exited.set()
        if not self._has_closed:
            with suppress(ProcessLookupError):  # what it had started
                os.killpg(self._pid, signal.SIGKILL)
        self.shows_output = self.shows_output or not self._started.done() or self._has_started
        if not self._started.done():
            self._started.set_exception(GenerationError(f"{self._name}: it did not start: {self._end}"))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(RetryableError(f"{self._name}: {self._end}"))

    def _take(self, reply: EngineReply) -> None:
        answer: asyncio.Future[Any] | None = self._answers.get(reply.number)
        if reply.number == STARTED:
            answer = self._started
        if answer is None or answer.done():
            return  # an episode that has ended meanwhile
        text = f"{self._name}: {reply.error}"
        self.shows_output = self.shows_output or reply.shows_output
        if reply.error:
            answer.set_exception(GenerationError(text) if reply.number == STARTED else RetryableError(text))
        elif reply.number == STARTED:
            answer.set_result(None)
        else:
            try:
                answer.set_result(decode_completions(reply.completion)[0])
            except CodecError as error:
                answer.set_exception(RetryableError(f"{self._name}: {error}"))

    def _send(self, message: bytes) -> None:
        assert self._transport is not None
        cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0)).write(message)


def find_members(group: int) -> Iterator[int]:
    """Yield a process group's processes that run."""
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):
            if os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                yield pid


class ReplicaSampler:
    """Engines of one policy, of which each episode gets one."""

    def __init__(self, samplers: Sequence[EngineSampler], has_ended: Callable[[int], bool]) -> None:
        """has_ended: whether the process of an engine has, by its index."""
        self._samplers = samplers
        self._has_ended = has_ended
        self._num_running = [0] * len(samplers)

    @contextmanager
    def episode(self) -> Iterator[EngineSampler]:
        """Lease the engine with the fewest episodes, of those that answer if there are any."""
        alive = [index for index, each in enumerate(self._samplers) if not (each.is_broken or self._has_ended(index))]
        index = min(alive or range(len(self._samplers)), key=self._num_running.__getitem__)
        self._num_running[index] += 1
        try:
            yield self._samplers[index]
        finally:
            self._num_running[index] -= 1


@asynccontextmanager
async def open_replicas(
    infer: GenerationConfig, folder: Path, target: PlayTarget, stop_ids: tuple[int, ...], seed: int
) -> AsyncIterator[ReplicaSampler]:
    """Serve a policy's folder by `num_replicas` engines while the context lasts.

    Each has a seed of its own, as in a run: members of a group would get the same answers.

    Raises:
        GenerationError: one of the engines did not start.
    """
    number, version = infer.num_replicas, parse_version(folder)
    order = EngineOrder(infer.model_dump_json().encode(), str(folder), version, target.sequence_length, seed)
    with ExitStack() as stack:
        sockets = stack.enter_context(TemporaryDirectory(prefix="ob-"))  # sockets have paths of 107 bytes at most
        names = [f"engine {index + 1} of {number}" for index in range(number)]
        engines = [EngineProcess(name, stack.enter_context(TemporaryFile())) for name in names]
        samplers = [EngineSampler(engine, sampling_of(target, stop_ids), version) for engine in engines]
        try:
            starts = (
                engine.start(order._replace(seed=seed + index), replica_environment(infer, index, sockets))
                for index, engine in enumerate(engines)
            )
            try:
                async with asyncio.TaskGroup() as starting:
                    for start in starts:
                        starting.create_task(start)
            except* GenerationError as errors:
                first = errors.exceptions[0]
                raise GenerationError(f"--engine {infer.strategy_args.strategy_name}: {first}") from first
            yield ReplicaSampler(samplers, lambda index: engines[index].has_ended)
        finally:
            failed = [each for each, sampler in zip(engines, samplers, strict=True) if sampler.has_failed]
            failed += [each for each in engines if each.shows_output and each not in failed]
            await asyncio.gather(*(engine.close() for engine in engines))
            for engine in failed:
                engine.show()


def replica_environment(infer: GenerationConfig, index: int, sockets: str) -> dict[str, str]:
    """Return variables of an engine's process: its devices, and vLLM's folder of sockets, which it leaves if killed."""
    environment = {SOCKETS: sockets}
    if infer.device == "cuda":
        size = infer.engine.world_size
        environment[VISIBLE] = visible_devices(range(index * size, (index + 1) * size), os.environ.get(VISIBLE))
    return environment
