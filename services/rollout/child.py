"""The process of one env: reads commands from its stdin, answers on its stdout (`services.rollout.process`).

Invariant: it never outlives its worker, not even hung: the end of its stdin kills its process group, and the kernel kills it
when its parent dies.
"""

import ctypes
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, cast

import msgpack

from envs.registry import TextEnv, make
from services.rollout.execution import close_quietly, do_reset, do_step, traits_of

PR_SET_PDEATHSIG = 1


class EnvServer:
    """One env and the commands that it understands."""

    def __init__(self) -> None:
        self._env: TextEnv | None = None
        self._commands: dict[str, Callable[..., Any]] = {
            "make": self._make,
            "reset": lambda seed: do_reset(self._made, seed),
            "step": lambda action: do_step(self._made, action),
            "close": lambda: close_quietly(self._made),
        }

    def answer(self, command: list[Any]) -> tuple[bool, Any]:
        """(True, result), or (False, what went wrong): whatever an env raises is an answer."""
        what, *args = command
        try:
            return True, self._commands[what](*args)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            return False, f"{type(error).__name__}: {error}"

    @property
    def _made(self) -> TextEnv:
        if self._env is None:
            raise RuntimeError("make comes first")
        return self._env

    def _make(self, env_type: str, env_config: dict[str, Any]) -> Any:
        self._env = make(env_type, env_config)
        return traits_of(self._env)


def read_commands(source: BinaryIO, commands: "queue.SimpleQueue[list[Any]]") -> None:
    """Read until the worker is gone; then end this process and all that it started."""
    while len(header := source.read(4)) == 4:
        commands.put(msgpack.unpackb(source.read(int.from_bytes(header, "little"))))
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    """Serve until the worker closes the pipe."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what an env prints must not end up among the answers
    source = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    commands: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
    threading.Thread(target=read_commands, args=(source, commands), daemon=True).start()
    server = EnvServer()
    while True:
        message = cast(bytes, msgpack.packb(server.answer(commands.get())))
        answers.write(len(message).to_bytes(4, "little") + message)
        answers.flush()


if __name__ == "__main__":
    main()
