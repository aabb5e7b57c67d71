"""Child side of `child_process`; imports only the standard library and msgpack.

Invariant: the end of stdin kills the child's process group, its worker's death the child.
"""

import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NoReturn, cast

import msgpack

from offbeat.services.process import claim_stdout, die_with_parent


def serve(commands: Mapping[str, Callable[..., Any]]) -> NoReturn:
    """Answer commands with (True, result) or (False, [error, traceback]) until the pipe closes."""
    die_with_parent()
    answers = claim_stdout()
    source = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    requests: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(source, requests), daemon=True).start()
    while True:
        message = answer(commands, requests.get())
        answers.write(len(message).to_bytes(4, "little") + message)
        answers.flush()


def answer(commands: Mapping[str, Callable[..., Any]], command: list[Any]) -> bytes:
    """Return a command's packed answer; a result that msgpack can't pack is an error."""
    name, *args = command
    try:
        return cast(bytes, msgpack.packb((True, commands[name](*args))))
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        report = [f"{type(error).__name__}: {error}", traceback.format_exc()]
        return cast(bytes, msgpack.packb((False, report), unicode_errors="backslashreplace"))


def _read(source: BinaryIO, requests: "queue.SimpleQueue[list[Any]]") -> None:
    while len(header := source.read(4)) == 4:
        requests.put(msgpack.unpackb(source.read(int.from_bytes(header, "little"))))
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
