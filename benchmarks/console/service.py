import asyncio
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket

import psutil
import uvicorn

from offbeat.benchmarks.harness.child_process import Child
from offbeat.deploy.cluster.run_factory import MeshRunFactory
from offbeat.services.control.api import create_api
from offbeat.services.control.service import ControlService
from offbeat.services.control.store import RunStore
from offbeat.services.process import free_port, freeze_started
from offbeat.services.redis.connection import connect_async

HOST = "127.0.0.1"


class ServiceProcess(Child):
    """Control service without a mesh, in a process of its own."""

    def __init__(self, redis_url: str, *, log: Path) -> None:
        port = free_port()
        self.url = f"http://{HOST}:{port}"
        super().__init__(_serve, (redis_url, port), log=log, goodbye=None)

    def cpu_s(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system


class _AnnouncingServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, pipe: Connection) -> None:
        super().__init__(config)
        self._pipe = pipe

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        self._pipe.send(None)


async def _serve(pipe: Connection, redis_url: str, port: int) -> None:
    redis = connect_async(redis_url)
    service = ControlService(RunStore(redis), MeshRunFactory(redis, redis_url, None), wake=lambda: None)
    server = _AnnouncingServer(uvicorn.Config(create_api(service), host=HOST, port=port, log_level="warning"), pipe)
    freeze_started()
    serving = asyncio.create_task(server.serve())
    await asyncio.to_thread(pipe.recv)
    server.should_exit = True
    await serving
