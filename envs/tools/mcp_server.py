"""Connections to Model Context Protocol servers, one per server and process, shared by its envs.

Invariants: a call returns within its timeout; a dead server is restarted at the next call; when the last env of a process
closes, the connection is closed and the server's process ended.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from offbeat.envs.optional_imports import require
from offbeat.envs.tools.functions import Call, Function, read_call

T = TypeVar("T")
START_S = 60.0
"""Timeout of the connection, server startup included."""
CLOSE_S = 3.0
PROBE_S = 2.0
"""Timeout of a probe after a call timed out."""


class McpAddress(NamedTuple):
    """Address of a server: a command to start, or a URL."""

    command: tuple[str, ...]
    url: str
    timeout_s: float


class McpServer:
    """Connection with an event loop in its own thread; its methods block."""

    def __init__(self, address: McpAddress) -> None:
        """Raises ValueError if the server can't be reached."""
        self._address = address
        self._connecting = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True).start()
        self._client: Any = None
        self._ending: asyncio.Event | None = None
        self._holding: asyncio.Task[None] | None = None
        try:
            self.functions = self._ask(_functions)
        except ValueError:
            self.close()
            raise

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Return (output of the tool, whether it succeeded)."""
        try:
            return self._ask(lambda client: _call(client, name, arguments))
        except ValueError as error:
            return str(error), False

    def close(self) -> None:
        """Close the connection, and the server if it was started here."""
        asyncio.run_coroutine_threadsafe(self._let_go(), self._loop).result(2 * CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _ask(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Run a request. Raises ValueError for any failure; the connection is then reopened unless the server answers a
        probe."""
        return asyncio.run_coroutine_threadsafe(self._limited(work), self._loop).result()

    async def _limited(self, work: Callable[[Any], Awaitable[T]]) -> T:
        where, limit_s = self._address.url or " ".join(self._address.command), self._address.timeout_s
        try:
            async with asyncio.timeout(START_S):
                client = await self._connected()
            async with asyncio.timeout(limit_s):
                return await work(client)
        except TimeoutError:
            await self._let_go_of_the_dead()
            raise ValueError(f"the MCP server {where} gave no answer in {limit_s:g} s") from None
        except Exception as error:
            await self._let_go()
            raise ValueError(f"the MCP server {where} failed: {error or type(error).__name__}") from error

    async def _connected(self) -> Any:
        async with self._connecting:
            if self._client is None:
                ready: asyncio.Future[Any] = self._loop.create_future()
                self._ending = asyncio.Event()
                self._holding = asyncio.create_task(self._hold(ready, self._ending))
                self._client = await ready
            return self._client

    async def _let_go_of_the_dead(self) -> None:
        """Close a server that does not answer; others' calls keep an answering one open."""
        try:
            async with asyncio.timeout(PROBE_S):
                await _functions(self._client)
        except Exception:
            # whatever is wrong with it, a new connection is what helps
            await self._let_go()

    async def _hold(self, ready: "asyncio.Future[Any]", ending: asyncio.Event) -> None:
        """Hold the connection open; it must be closed by the task that opened it."""
        mcp = require("mcp", "mcp")
        address = self._address
        command = address.command
        server = address.url or mcp.StdioServerParameters(command=command[0], args=list(command[1:]))
        try:
            async with mcp.Client(server) as client:
                ready.set_result(client)
                await ending.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)

    async def _let_go(self) -> None:
        holding, self._holding, self._client = self._holding, None, None
        if holding is None or self._ending is None:
            return
        self._ending.set()
        _, hanging = await asyncio.wait({holding}, timeout=CLOSE_S)
        for task in hanging:
            task.cancel()


async def _functions(client: Any) -> tuple[Function, ...]:
    listed = await client.list_tools()
    return tuple(Function(tool.name, tool.description or "", dict(tool.input_schema)) for tool in listed.tools)


async def _call(client: Any, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    result = await client.call_tool(name, arguments)
    parts = [str(getattr(part, "text", f"({part.type})")) for part in result.content]
    return "\n".join(parts) or "(nothing was returned)", not result.is_error


class SharedServers:
    """Reference-counted servers of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[McpAddress, tuple[McpServer, int]] = {}

    def take(self, address: McpAddress) -> McpServer:
        """Return a shared connection. Raises ValueError if the server can't be reached."""
        with self._lock:
            server, users = self._servers.get(address) or (McpServer(address), 0)
            self._servers[address] = (server, users + 1)
            return server

    def give_back(self, address: McpAddress) -> None:
        """Release a connection; the last release closes it."""
        with self._lock:
            server, users = self._servers.pop(address)
            if users > 1:
                self._servers[address] = (server, users - 1)
                return
        server.close()


SHARED = SharedServers()


class McpSession:
    """Functions of a server as offered to one env."""

    def __init__(self, address: McpAddress, offered: tuple[str, ...], instruction: str) -> None:
        """offered: names; empty offers all.

        Raises:
            ValueError: the server can't be reached, or lacks a function.
        """
        self._address = address
        self._server = SHARED.take(address)
        known = {function.name: function for function in self._server.functions}
        if unknown := [name for name in offered if name not in known]:
            SHARED.give_back(address)
            raise ValueError(f"functions: the server has no {unknown[0]!r}; it has {', '.join(known) or 'none'}")
        self._functions = {name: known[name] for name in (offered or known)}
        self.functions = tuple(self._functions.values())
        self.instruction = instruction.replace("{tools}", "\n".join(f.told() for f in self.functions))

    def takes(self, text: str) -> bool:
        """Return True if the call is of one of these functions."""
        try:
            return read_call(text).name in self._functions
        except ValueError:
            return False

    def use(self, text: str) -> tuple[str, bool]:
        """Make the call in `text` and return (output, whether it succeeded)."""
        try:
            return self.make(read_call(text))
        except ValueError as error:
            return str(error), False

    def make(self, call: Call) -> tuple[str, bool]:
        """Make a call and return (output, whether it succeeded)."""
        if call.name not in self._functions:
            return f"there is no function {call.name!r}; there is {', '.join(self._functions)}", False
        return self._server.call(call.name, call.arguments)

    def close(self) -> None:
        SHARED.give_back(self._address)
