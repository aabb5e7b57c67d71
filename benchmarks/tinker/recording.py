"""Commands that a client sends to Tinker's API, recorded on the way to the server.

Invariant: bytes pass unchanged in both directions; a command is recorded once, however often it is sent.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

import h11
from anyio.from_thread import start_blocking_portal

from offbeat.services.tinker.records import request_id_of
from offbeat.services.tinker.wire import decode_forward_backward

GRADIENT = "forward_backward"
ROUTES = {GRADIENT, "create_model", "optim_step", "save_weights", "load_weights", "save_weights_for_sampler"}
"""Of commands, without the API's prefix."""
CHUNK = 1 << 16


class CommandId(NamedTuple):
    model_id: str
    seq_id: int

    @property
    def session_id(self) -> str:
        return self.model_id.partition(":")[0]

    @property
    def request_id(self) -> str:
        return request_id_of(self.model_id, self.seq_id)


@dataclass(frozen=True, slots=True)
class RecordedCommand:
    route: str
    body: bytes
    """As sent."""

    @property
    def id(self) -> CommandId:
        if self.route == GRADIENT:
            request = decode_forward_backward(self.body)
            return CommandId(request.model_id, request.seq_id)
        fields = json.loads(self.body)
        if fields.get("model_id") is not None:
            return CommandId(fields["model_id"], fields["seq_id"])
        return CommandId(f"{fields['session_id']}:train:{fields['model_seq_id']}", 0)


Commands = Mapping[CommandId, RecordedCommand]


@dataclass(slots=True)
class Recorder:
    """server: address. on_command: called with each command that has not been sent before."""

    server: str
    on_command: Callable[[RecordedCommand], None]
    commands: dict[CommandId, RecordedCommand] = field(default_factory=dict[CommandId, RecordedCommand])
    url: str = ""
    _clients: dict[asyncio.StreamWriter, asyncio.Task[None]] = field(default_factory=dict)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Recorder"]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = "http://{}:{}".format(*server.sockets[0].getsockname())
        try:
            yield self
        finally:
            server.close()
            for writer in self._clients:
                writer.close()
            await asyncio.gather(*self._clients.values())

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients[writer] = task = asyncio.create_task(self._connect(reader, writer))
        task.add_done_callback(lambda _: self._clients.pop(writer))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = urlsplit(self.server)
        try:
            answers, server = await asyncio.open_connection(address.hostname, address.port)
        except OSError:
            writer.close()
            return
        requests = _RequestParser(self._record)
        await asyncio.gather(_forward(reader, server, requests.read), _forward(answers, writer, lambda _: None))

    def _record(self, target: str, body: bytes) -> None:
        route = target.rpartition("/")[2]
        if route not in ROUTES:
            return
        command = RecordedCommand(route, body)
        if self.commands.setdefault(command.id, command) is command:
            self.on_command(command)


class _RequestParser:
    """Requests of a connection, from the bytes that its client sends."""

    def __init__(self, on_request: Callable[[str, bytes], None]) -> None:
        self._on_request = on_request
        self._connection = h11.Connection(h11.SERVER)
        self._target, self._body = "", b""

    def read(self, data: bytes) -> None:
        self._connection.receive_data(data)
        while True:
            match self._connection.next_event():
                case h11.Request(target=target):
                    self._target, self._body = target.decode(), b""
                case h11.Data(data=part):
                    self._body += part
                case h11.EndOfMessage():
                    self._on_request(self._target, self._body)
                    self._finish()
                case _:  # more is to come
                    return

    def _finish(self) -> None:
        """Tell the parser that the request is answered, as the next one can't begin before."""
        self._connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
        self._connection.send(h11.EndOfMessage())
        self._connection.start_next_cycle()


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_data: Callable[[bytes], None]
) -> None:
    """Pass on what comes until either side closes, and close the other."""
    try:
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                on_data(data)
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()


@contextmanager
def recording(server: str, on_command: Callable[[RecordedCommand], None] = lambda _: None) -> Iterator[Recorder]:
    """Forward connections to a server, for as long as the context is open."""
    recorder = Recorder(server, on_command)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(recorder.listening()):
        yield recorder
