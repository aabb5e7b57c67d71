"""Proxy that disturbs connections to redis-server.

Started by a program for `redis.server` on the run's port, it becomes the real server on another; the kernel ends both
together. Invariant: a connection's bytes arrive in order and unchanged, or it is cut.
"""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offbeat.services.process import die_with_parent, free_port

CUT, TORN, DELAYED, SILENT = "cut", "torn", "delayed", "silent"
FAILOVER = "failover"
"""Order `REPLICA PRIVATE` (ports): the next server copies REPLICA's data and listens on PRIVATE; its proxy waits for
the order's removal."""
POLL_INTERVAL_S = 0.02
BIND_S = 5.0
CHUNK = 1 << 16


def write_server_script(path: Path, server: Path, orders: Path) -> Path:
    """Write the program for `redis.server`. orders: folder of requests."""
    lines = [
        f"#!{sys.executable}",
        "import sys",
        f"sys.path[:0] = {sys.path!r}",
        "from offbeat.benchmarks.chaos.proxy import become_server",
        f"become_server({str(server)!r}, {str(orders)!r})",
    ]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


def become_server(server: str, orders: str) -> None:
    """Start the proxy on stdin's port; become the server on another."""
    lines = sys.stdin.read().splitlines()
    public = next(line.split()[1] for line in lines if line.startswith("port "))
    private = str(free_port())
    with suppress(FileNotFoundError):
        replica, private = (Path(orders) / FAILOVER).read_text().split()
        lines = _copy_of(lines, replica)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.Popen(
        [sys.executable, "-m", "offbeat.benchmarks.chaos.proxy", public, private, orders, str(os.getpid())],
        env=environment,
    )
    moved = os.memfd_create("configuration")
    os.write(
        moved, "\n".join([*(f"port {private}" if line.startswith("port ") else line for line in lines), ""]).encode()
    )
    os.lseek(moved, 0, os.SEEK_SET)
    os.dup2(moved, 0)
    os.execv(server, [server, "-"])


def _copy_of(lines: list[str], port: str) -> list[str]:
    """Return the configuration of a server that copies the data of `port`."""
    passwords = [line.split()[1] for line in lines if line.startswith("requirepass ")]
    kept = [line for line in lines if not line.startswith("appendonly ")]
    return [*kept, f"replicaof 127.0.0.1 {port}", *(f"masterauth {each}" for each in passwords)]


@dataclass
class NetworkConditions:
    delay_s: float = 0.0
    silent_until: float = 0.0
    """Monotonic, s."""
    torn: bool = False


class Proxy:
    def __init__(self, port: int, orders: Path) -> None:
        self._port = port
        self._orders = orders
        self._weather = NetworkConditions()
        self._open: set[asyncio.StreamWriter] = set()

    async def run(self, public: int) -> None:
        async with await self._listen(public):
            while True:
                self._execute_orders()
                await asyncio.sleep(POLL_INTERVAL_S)

    async def _listen(self, public: int) -> asyncio.Server:
        deadline = time.monotonic() + BIND_S
        while True:
            try:
                return await asyncio.start_server(self._serve, "127.0.0.1", public, limit=CHUNK)
            except OSError:  # the proxy of the server before this one is just ending
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(POLL_INTERVAL_S)

    def _execute_orders(self) -> None:
        """Execute orders: files `NAME-SECONDS`, delay as text."""
        self._weather.delay_s = 0.0
        for order in self._orders.glob("redis-*"):
            kind = order.name.removeprefix("redis-")
            if kind == DELAYED:  # as long as the file exists
                with suppress(OSError, ValueError):
                    self._weather.delay_s = float(order.read_text() or 0)
                continue
            with suppress(OSError, ValueError):
                seconds = float(order.read_text() or 0)
                order.unlink()
                self._execute(kind, seconds)

    def _execute(self, kind: str, seconds: float) -> None:
        if kind == SILENT:
            self._weather.silent_until = time.monotonic() + seconds
        elif kind == TORN:
            self._weather.torn = True
            asyncio.get_running_loop().call_later(seconds, self._restore)
        elif kind == CUT:
            self._cut_all()

    def _restore(self) -> None:
        self._weather.torn = False
        self._cut_all()

    def _cut_all(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up, down = await asyncio.open_connection("127.0.0.1", self._port, limit=CHUNK)
        except OSError:
            writer.transport.abort()
            return
        mine = {writer, down}
        self._open |= mine
        try:
            await asyncio.gather(self._forward(reader, down, answers=False), self._forward(up, writer, answers=True))
        except OSError:
            pass
        finally:
            self._open -= mine
            for connection in mine:
                connection.transport.abort()

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool) -> None:
        while chunk := await source.read(CHUNK):
            if self._weather.delay_s:
                await asyncio.sleep(self._weather.delay_s)
            await asyncio.sleep(max(self._weather.silent_until - time.monotonic(), 0.0))
            if answers and self._weather.torn:
                sink.write(chunk[: len(chunk) // 2])
                await sink.drain()
                raise ConnectionError("torn")
            sink.write(chunk)
            await sink.drain()
        raise ConnectionError("one end has closed")


def main() -> None:
    public, private, orders, parent = sys.argv[1:]
    die_with_parent(int(parent))
    while (Path(orders) / FAILOVER).exists():
        time.sleep(POLL_INTERVAL_S)
    asyncio.run(Proxy(int(private), Path(orders)).run(int(public)))


if __name__ == "__main__":
    main()
