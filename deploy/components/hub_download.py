"""Downloads of hub models and datasets before a run's other components are built.

Invariant: a download is a process that ends with its control replica; complete files stay in the hub's cache.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence

from offbeat.deploy.components.ray_actors import last_line
from offbeat.services.control.interfaces import Health, Observation
from offbeat.services.live_settings import Settings
from offbeat.services.process import bind_to_thread, terminate

STOP_TIMEOUT_S = 2.0


class HubDownload:
    def __init__(self, name: str) -> None:
        """name: `ID@COMMIT` of a model, `ID:CONFIG/SPLIT@COMMIT` of a dataset."""
        self.name = f"download of {name}"
        self._id = name
        self._kind = "dataset" if ":" in name else "model"
        self._process: subprocess.Popen[str] | None = None
        self._problem: str | None = None

    async def ensure(self) -> None:
        if self._process is None:
            self._start()

    def _start(self) -> None:
        module = "offbeat.deploy.config.hub_datasets" if self._kind == "dataset" else "offbeat.deploy.config.hub"
        search_path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            bind_to_thread([sys.executable, "-m", module, self._id]),
            env={**os.environ, "PYTHONPATH": search_path, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    async def stop(self, *, now: bool) -> None:
        del now
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(terminate, process, STOP_TIMEOUT_S)

    async def observe(self) -> Observation:
        if self._process is None:
            return Observation(Health.ABSENT)
        code = self._process.poll()
        if code is None:
            return Observation(Health.STARTING, f"takes the {self._kind} from the hub")
        if code == 0:
            return Observation(Health.READY)
        if self._problem is None:
            assert self._process.stderr is not None
            self._problem = last_line(self._process.stderr.read())
        return Observation(Health.BROKEN, self._problem)


class DownloadMesh:
    """Components of a run with missing models or datasets."""

    def __init__(self, names: Sequence[str]) -> None:
        self._components = [HubDownload(name) for name in names]

    @property
    def components(self) -> Sequence[HubDownload]:
        return self._components

    async def prepare(self) -> None: ...

    async def apply_settings(self, settings: Settings, *, paused: bool) -> None: ...

    async def drain(self) -> None: ...

    async def clean_up(self) -> None: ...
