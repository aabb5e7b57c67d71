"""Episodes played again for their frames, a few at a time and in threads that no other route needs."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

from offbeat.services.control.console.archive import RunArchive
from offbeat.services.control.console.schemas import FramesView
from offbeat.services.errors import ControlError

MAX_REPLAYS = 2
"""Each is a process that runs code of an env, for a minute at most."""


class TooManyReplaysError(ControlError):
    """Too many episodes are being played again."""


class Replays:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_REPLAYS, thread_name_prefix="replay")
        self._running: set[Future[FramesView]] = set()

    async def frames(self, archive: RunArchive, number: int, index: int) -> FramesView:
        """Return an episode's frames; a replay whose caller leaves counts until its end.

        Raises:
            TooManyReplaysError: try again.
            UnknownGroupError, NotRecordedError: as `RunArchive.frames`.
        """
        if len(self._running) >= MAX_REPLAYS:
            raise TooManyReplaysError(f"{MAX_REPLAYS} episodes are being played again: try again in a minute")
        replay = self._threads.submit(archive.frames, number, index)
        self._running.add(replay)
        replay.add_done_callback(self._running.discard)
        return await asyncio.wrap_future(replay)
