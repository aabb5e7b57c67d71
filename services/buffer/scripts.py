"""The buffer's Lua scripts: each is one atomic command of the buffer; the header of its file states its contract.

Redis runs a script whole or not at all, so a process that is killed between any two commands leaves a consistent buffer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from redis import Redis
from redis import exceptions as redis_errors
from redis.asyncio import Redis as AsyncRedis

from services.errors import BufferError, FencedError, RetryableError
from services.keys import RunKeys

FOLDER = Path(__file__).parent
SHARED = ("prelude", "sweep")
LONGEST_BLOCK_S = 5.0
"""Longest blocking read; below the clients' socket timeout, so that a dead connection is noticed."""


def group_id_of(run_id: str, number: int) -> str:
    """The name of training group `number`."""
    return f"{run_id}-{number}"


@cache
def script_source(name: str) -> str:
    """The text of a script as Redis gets it."""
    return "\n".join((FOLDER / f"{part}.lua").read_text() for part in (*SHARED, name))


@contextmanager
def errors_translated() -> Iterator[None]:
    """Turn what Redis raises into the mesh's errors.

    Raises:
        RetryableError: Redis can't be reached or is loading; every command of the buffer may be sent again.
        FencedError: a newer learner holds the run.
        BufferError: the buffer refused the command.
    """
    try:
        yield
    except (redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
        raise RetryableError(f"Redis does not answer: {error}") from error
    except redis_errors.ResponseError as error:
        # Redis 7 puts ERR before a code of our own, 6 does not.
        text = str(error).removeprefix("ERR ")
        if text.startswith("FENCED "):
            raise FencedError(text.removeprefix("FENCED ")) from error
        raise BufferError(text) from error


class BufferKeys:
    """Names of the buffer's keys of one run; prelude.lua says what each holds."""

    def __init__(self, run_id: str) -> None:
        run = RunKeys(run_id)
        self.root = run.key("buffer")
        self.stream = f"{self.root}:stream"
        self.limits = f"{self.root}:limits"
        self.life = f"{self.root}:life"
        self.quarantine = f"{self.root}:quarantine"
        self.doorbell = run.doorbell
        self.of_scripts = [
            self.root,
            run.progress,
            run.epoch,
            run.doorbell,
            run.changes,
            run.adopted,
            run.record,
            run.history,
        ]


class BufferScripts:
    """The scripts of one run, called synchronously."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._keys = BufferKeys(run_id).of_scripts
        self._script = cache(lambda name: redis.register_script(script_source(name)))

    def __call__(self, name: str, *args: str | bytes | int | float) -> Any:
        """Run a script. Raises as `errors_translated` says."""
        with errors_translated():
            return self._script(name)(keys=self._keys, args=args)


class AsyncBufferScripts:
    """The scripts of one run, called from a loop."""

    def __init__(self, redis: AsyncRedis, run_id: str) -> None:
        self._keys = BufferKeys(run_id).of_scripts
        self._script = cache(lambda name: redis.register_script(script_source(name)))

    async def __call__(self, name: str, *args: str | bytes | int | float) -> Any:
        """Run a script. Raises as `errors_translated` says."""
        with errors_translated():
            return await self._script(name)(keys=self._keys, args=args)
