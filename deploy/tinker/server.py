"""`offbeat tinker`: supervision of a Tinker server's processes.

Invariant: acknowledged commands are in Redis and states on disk, so that any process may be killed.
"""

import asyncio
import socket
from contextlib import suppress

import msgspec

from offbeat.deploy.config.run import RunConfig
from offbeat.deploy.local.signals import termination_signals
from offbeat.deploy.local.supervised_redis import SupervisedRedis
from offbeat.deploy.local.supervision import run_beside
from offbeat.deploy.run_folder import locked
from offbeat.deploy.tinker.child import SupervisedChild
from offbeat.deploy.tinker.http_process import HttpSettings
from offbeat.deploy.tinker.setup import TinkerSetup
from offbeat.services.errors import MeshError

HTTP = "offbeat.deploy.tinker.http_process"


class TinkerServer:
    def __init__(self, config: RunConfig) -> None:
        """Prepare the folder and bind the port; raises MeshError."""
        self._config = config
        self._setup = TinkerSetup(config)
        self._socket = self._listen()
        self._redis = SupervisedRedis(self._setup.root / "redis", config.redis)
        self._children: list[SupervisedChild] = []

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def model_name(self) -> str:
        return self._setup.model_name

    async def run(self) -> None:
        """Serve until a termination signal; raises MeshError if a part keeps dying."""
        stopped = asyncio.Event()
        for number in termination_signals():
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        with locked(self._config.output_dir):
            await self._redis.start()
            try:
                self._children = [self._setup.learner(self._redis.url), self._http()]
                supervisors = [self._redis.supervise(), *(each.supervise() for each in self._children)]
                await run_beside(stopped.wait(), supervisors)
            finally:
                for child in reversed(self._children):  # first the one that accepts commands
                    await asyncio.to_thread(child.stop)
                self._redis.stop()
                self._socket.close()

    def _listen(self) -> socket.socket:
        host, port = self._config.tinker.host, self._config.tinker.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            raise MeshError(
                f"tinker.port: {host}:{port} can't be listened on ({error.strerror}): set another"
            ) from error

    def _http(self) -> SupervisedChild:
        descriptor = self._socket.fileno()
        settings = HttpSettings(descriptor=descriptor, service=self._setup.service(self._redis.url))
        return self._setup.child("HTTP server", HTTP, msgspec.json.encode(settings), [descriptor])


def serve(server: TinkerServer) -> None:
    with suppress(KeyboardInterrupt):
        asyncio.run(server.run())
