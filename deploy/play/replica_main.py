"""Process of one of several engines, which samples for `replicas`.

Invariant: the end of standard input ends the process and its engine; a minute later, its process group.
"""

import asyncio
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from offbeat.deploy.play.engine import START_FAILURES, describe_failure
from offbeat.services.errors import CodecError, GenerationError, RetryableError
from offbeat.services.generation.config import GenerationConfig
from offbeat.services.generation.engine import PolicyEngine
from offbeat.services.generation.engines import start_serving
from offbeat.services.messages.codec import decode_requests, encode_completions
from offbeat.services.messages.types import Completion
from offbeat.services.process import claim_stdout

SOCKETS = "VLLM_RPC_BASE_PATH"
"""Variable that names vLLM's folder of sockets."""
LENGTH_BYTES = 4
CLOSE_TIMEOUT_S = 60.0


class EngineOrder(NamedTuple):
    """First message to the process: the engine to start, as of `start_serving`."""

    infer: bytes
    """`GenerationConfig` as JSON."""
    folder: str
    version: int
    sequence_length: int
    seed: int


class TurnOrder(NamedTuple):
    number: int
    request: bytes = b""
    """Of `encode_requests`; empty: the turn is cancelled."""


class EngineReply(NamedTuple):
    """Answer to the engine's order (number -1), or to a turn's."""

    number: int
    completion: bytes = b""
    """Of `encode_completions`; empty: `error`, or the engine has started."""
    error: str = ""
    shows_output: bool = False
    """Whether what the process printed may say more."""


STARTED = -1


def pack(message: EngineOrder | TurnOrder | EngineReply) -> bytes:
    """Encode a message behind its length."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class _Connection:
    """Orders of the parent process, and answers to it."""

    def __init__(self) -> None:
        self._answers = claim_stdout()
        self._source = os.fdopen(os.dup(0), "rb")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        self.orders: asyncio.Queue[TurnOrder] = asyncio.Queue()
        self.has_ended = False
        """Whether the parent process has closed its end, or is gone."""

    def read_engine(self) -> EngineOrder:
        return msgspec.msgpack.decode(_read_body(self._source), type=EngineOrder)

    def start_reading(self, loop: asyncio.AbstractEventLoop) -> None:
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()

    def send(self, reply: EngineReply) -> None:
        try:
            self._answers.write(pack(reply))
            self._answers.flush()
        except BrokenPipeError:
            sys.exit(0)

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while body := _read_body(self._source):
            order = msgspec.msgpack.decode(body, type=TurnOrder)
            loop.call_soon_threadsafe(self.orders.put_nowait, order)
        self.has_ended = True
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(CLOSE_TIMEOUT_S)
        os.killpg(0, signal.SIGKILL)


def _read_body(source: BinaryIO) -> bytes:
    """Read a message; empty at the end."""
    header = source.read(LENGTH_BYTES)
    return source.read(int.from_bytes(header, "little")) if len(header) == LENGTH_BYTES else b""


async def _serve(order: EngineOrder, connection: _Connection) -> None:
    connection.start_reading(asyncio.get_running_loop())
    try:
        engine = await start_serving(
            GenerationConfig.model_validate_json(order.infer),
            Path(order.folder),
            order.version,
            sequence_length=order.sequence_length,
            seed=order.seed,
        )
    except START_FAILURES as error:
        message, shows_output = describe_failure(error)
        connection.send(EngineReply(STARTED, error=message, shows_output=shows_output))
        return
    running: dict[int, asyncio.Task[None]] = {}
    try:
        connection.send(EngineReply(STARTED))
        async with asyncio.TaskGroup() as turns:
            while True:
                turn = await connection.orders.get()
                if turn.request:
                    running[turn.number] = task = turns.create_task(_sample(engine, turn, order.version, connection))
                    task.add_done_callback(lambda _, number=turn.number: running.pop(number))
                elif task := running.get(turn.number):
                    task.cancel()
    finally:
        engine.close()


async def _sample(engine: PolicyEngine, turn: TurnOrder, version: int, connection: _Connection) -> None:
    try:
        (request,) = decode_requests(turn.request)
        completion = await engine.generate(request, version)
    except (CodecError, GenerationError) as error:
        completion = Completion("", error=str(error))
    except RetryableError as error:
        connection.send(EngineReply(turn.number, error=str(error)))
        return
    connection.send(EngineReply(turn.number, _encode(completion)))


def _encode(completion: Completion) -> bytes:
    try:
        return encode_completions([completion])
    except CodecError as error:  # such as a logprob that is not finite
        return encode_completions([Completion(completion.request_id, error=str(error))])


def main() -> None:
    # vLLM catches a KeyboardInterrupt in its start, and waits for what it has closed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    connection = _Connection()
    try:
        asyncio.run(_serve(connection.read_engine(), connection))
    finally:
        if connection.has_ended:  # the parent removes it, too, unless it was killed
            shutil.rmtree(os.environ[SOCKETS], ignore_errors=True)


if __name__ == "__main__":
    main()
