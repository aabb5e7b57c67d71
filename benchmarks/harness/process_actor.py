"""Asynchronous object in a child process."""

import asyncio
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from offbeat.benchmarks.harness.child_process import Child


class ActorObject(Protocol):
    """Object created in the parent, started in the child."""

    async def start(self) -> None: ...

    def close(self) -> None: ...


class ProcessActor(Child):
    def __init__(self, served: ActorObject, log: Path) -> None:
        super().__init__(_serve, (served,), log=log, goodbye=None)

    def call(self, method: str, *args: Any) -> Any:
        return self._ask((method, args))


async def _serve(pipe: Connection, served: Any) -> None:
    await served.start()
    pipe.send(None)
    try:
        while (message := await asyncio.to_thread(pipe.recv)) is not None:
            method, args = message
            pipe.send(await getattr(served, method)(*args))
    finally:
        served.close()
