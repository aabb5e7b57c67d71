"""Connections to Model Context Protocol servers, one per server and process.

Invariants: a call returns within its timeout and `FAILED_CALL_END_S`, also while the server starts; a failed call leaves
other envs the connection of a server that answers; a dead server is restarted at the next call; the last env to close ends
the server.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from offbeat.envs.optional_imports import require
from offbeat.envs.tools.functions import Call, Function, read_call

T = TypeVar("T")
CONNECT_TIMEOUT_S = 60.0
"""Includes server startup."""
CLOSE_TIMEOUT_S = 3.0
NOTHING = "(nothing was returned)"
PROBE_TIMEOUT_S = 2.0
"""After a failed call."""
FAILED_CALL_END_S = PROBE_TIMEOUT_S + 2 * CLOSE_TIMEOUT_S
"""Longest time from a call's failure to its return."""


class McpAddress(NamedTuple):
    """Command to start, or URL."""

    command: tuple[str, ...]
    url: str
    timeout_s: float


class McpServer:
    """Blocking connection with its event loop in a thread."""

    def __init__(self, address: McpAddress) -> None:
        """Raises ValueError if unreachable, or without the extra `mcp`."""
        self._mcp = require("mcp", "mcp")
        self._address = address
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._thread.start()
        self._client: Any = None
        self._ready: asyncio.Future[Any] | None = None
        self._close_requested: asyncio.Event | None = None
        self._connection_task: asyncio.Task[None] | None = None
        try:
            self.functions = self._run(_list_functions, CONNECT_TIMEOUT_S + address.timeout_s)
        except ValueError:
            self.close()
            raise

    def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> tuple[str, bool]:
        """Return (output, success). timeout_s: upper bound besides the server's own."""
        try:
            timeout_s = min(timeout_s, self._address.timeout_s)
            return self._run(lambda client: _call_tool(client, name, arguments), timeout_s)
        except ValueError as error:
            return str(error), False

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._disconnect(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, request: Callable[[Any], Awaitable[T]], timeout_s: float) -> T:
        """Run a request; raises ValueError. Reconnects later, unless a probe after a failure is answered."""
        return asyncio.run_coroutine_threadsafe(self._run_with_timeout(request, timeout_s), self._loop).result()

    async def _run_with_timeout(self, request: Callable[[Any], Awaitable[T]], timeout_s: float) -> T:
        server, client = self._address.url or " ".join(self._address.command), None
        try:
            async with asyncio.timeout(timeout_s):
                client = await self._connect()
                return await request(client)
        except TimeoutError:
            await self._disconnect_if_dead(client)
            raise ValueError(f"the MCP server {server} gave no answer in {round(timeout_s, 1):g} s") from None
        except Exception as error:
            await self._disconnect_if_dead(client)
            raise ValueError(f"the MCP server {server} failed: {str(error) or type(error).__name__}") from error

    async def _connect(self) -> Any:
        """Return the connected client; the connection is still made if the caller gives up, for the next one."""
        if self._ready is None or self._connection_task is None or self._connection_task.done():
            self._client, self._ready, self._close_requested = None, self._loop.create_future(), asyncio.Event()
            self._connection_task = asyncio.create_task(self._keep_connection(self._ready, self._close_requested))
        ready = self._ready
        client = await asyncio.shield(ready)
        if ready is self._ready:
            self._client = client
        return client

    async def _disconnect_if_dead(self, client: Any) -> None:
        """Disconnect a failed call's client, unless a newer one has replaced it or the server answers a probe."""
        if client is None or client is not self._client:
            return
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await client.list_tools(cache_mode="bypass")
        except Exception:
            # any failure is resolved by a new connection
            if client is self._client:
                await self._disconnect()

    async def _keep_connection(self, ready: "asyncio.Future[Any]", close_requested: asyncio.Event) -> None:
        """Hold the connection open in the task that closes it; `ready` fails after `CONNECT_TIMEOUT_S`."""
        command = self._address.command
        try:
            server = self._address.url or self._mcp.StdioServerParameters(command=command[0], args=list(command[1:]))
            async with asyncio.timeout(CONNECT_TIMEOUT_S) as startup, self._mcp.Client(server) as client:
                startup.reschedule(None)
                ready.set_result(client)
                await close_requested.wait()
        except Exception as error:
            if not ready.done():
                is_late = isinstance(error, TimeoutError)
                ready.set_exception(ConnectionError(f"no connection in {CONNECT_TIMEOUT_S:g} s") if is_late else error)
                ready.exception()  # retrieved, as no call may wait for it

    async def _disconnect(self) -> None:
        connection, self._connection_task, self._client = self._connection_task, None, None
        if connection is None or self._close_requested is None:
            return
        self._close_requested.set()
        _, pending = await asyncio.wait({connection}, timeout=CLOSE_TIMEOUT_S)
        if pending:
            connection.cancel()
            await asyncio.wait({connection}, timeout=CLOSE_TIMEOUT_S)


async def _list_functions(client: Any) -> tuple[Function, ...]:
    """Read all pages; a server may end with an empty cursor, or repeat one."""
    tools: dict[str, Any] = {}
    cursors: set[str | None] = set()
    cursor: str | None = None
    while cursor not in cursors:
        cursors.add(cursor)
        page = await client.list_tools(cursor=cursor)
        tools |= {tool.name: tool for tool in page.tools}
        cursor = page.next_cursor or None
    return tuple(Function(tool.name, tool.description or "", dict(tool.input_schema)) for tool in tools.values())


async def _call_tool(client: Any, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    result = await client.call_tool(name, arguments)
    parts = [str(getattr(part, "text", f"({part.type})")) for part in result.content]
    text = "\n".join(parts)
    return text if text.strip() else NOTHING, not result.is_error


class SharedServers:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[McpAddress, tuple[McpServer, int]] = {}

    def acquire(self, address: McpAddress) -> McpServer:
        """Return a shared connection; raises ValueError if unreachable."""
        with self._lock:
            server, users = self._servers.get(address) or (McpServer(address), 0)
            self._servers[address] = (server, users + 1)
            return server

    def release(self, address: McpAddress) -> None:
        """Release a connection, closing it with the last."""
        with self._lock:
            server, users = self._servers.pop(address)
            if users > 1:
                self._servers[address] = (server, users - 1)
                return
        server.close()


SHARED = SharedServers()


class McpSession:
    """A server's functions offered to one env."""

    def __init__(self, address: McpAddress, offered: tuple[str, ...], instruction: str) -> None:
        """offered: names; empty: all. Raises ValueError if unreachable or without such a function."""
        self._address = address
        self._server = SHARED.acquire(address)
        known = {function.name: function for function in self._server.functions}
        if unknown := [name for name in offered if name not in known]:
            SHARED.release(address)
            raise ValueError(f"functions: the server has no {unknown[0]!r}; it has {', '.join(known) or 'none'}")
        self._functions = {name: known[name] for name in (offered or known)}
        self.functions = tuple(self._functions.values())
        self.instruction = instruction.replace("{tools}", "\n".join(f.to_json() for f in self.functions))

    def accepts(self, text: str) -> bool:
        try:
            return read_call(text).name in self._functions
        except ValueError:
            return False

    def use(self, text: str, timeout_s: float) -> tuple[str, bool]:
        try:
            return self.call_function(read_call(text), timeout_s)
        except ValueError as error:
            return str(error), False

    def call_function(self, call: Call, timeout_s: float) -> tuple[str, bool]:
        """Return (output, success)."""
        if call.name not in self._functions:
            return f"there is no function {call.name!r}; there is {', '.join(self._functions)}", False
        return self._server.call(call.name, call.arguments, timeout_s)

    def close(self) -> None:
        SHARED.release(self._address)
