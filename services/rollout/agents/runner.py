"""Process of Python agents, run as a script by Python 3.10 or later, without Offbeat.

JSON lines: `{"id", "path", "task"}` or `{"cancel": id}`; answers `{"id", "result", "children"}` or `{"id", "error",
"kind", "trace", "children"}`, and `{"can_cancel": true}` before the first coroutine. Invariants: the agent's
stdout is stderr; the process ends with its parent and all descendants.
"""

import asyncio
import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
TASK_MODULE = "offbeat_agent_task"
Requests = queue.SimpleQueue[dict[str, Any]]


def load_task_class() -> Any:
    """Load `task.py` by path."""
    spec = importlib.util.spec_from_file_location(TASK_MODULE, Path(__file__).with_name("task.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[TASK_MODULE] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.AgentTask


def find_agent(path: str) -> Any:
    """Import `module:function`, or instantiate `module:Class`.

    Raises:
        ValueError: it does not exist.
    """
    module, _, attribute = path.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"agent_runner.path {path!r}: {error}") from error
    if inspect.isclass(function):
        function = function()
    if not callable(function):
        raise ValueError(f"agent_runner.path {path!r} is a {type(function).__name__}, not a function")
    return function


async def _await(awaitable: Any) -> Any:
    return await awaitable


def is_coroutine(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class AgentServer:
    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._functions: dict[str, Any] = {}
        self._task_class = load_task_class()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._children = LeftChildren()

    def serve(self, requests: Requests) -> None:
        """Answer plain functions sequentially, coroutine functions concurrently."""
        while True:
            request = requests.get()
            if "cancel" in request:
                continue  # a plain function can't be cancelled: its process is killed
            try:
                function = self._find(request["path"])
                if is_coroutine(function):
                    self._send({"can_cancel": True})
                    asyncio.run(self._serve_all(requests, request))
                if request["shared"]:
                    raise ValueError("agent_runner.episodes_per_process above 1 needs a coroutine function (async def)")
                self._children.begin()
                result = function(self._task_class(**request["task"]))
                self._answer(request, asyncio.run(_await(result)) if inspect.isawaitable(result) else result)
            except (Exception, SystemExit) as error:
                self._fail(request, error)

    async def _serve_all(self, requests: Requests, request: dict[str, Any]) -> None:
        while True:
            if "cancel" in request:
                running = self._running.get(request["cancel"])
                if running is not None:
                    running.cancel()
            else:
                self._running[request["id"]] = asyncio.create_task(self._await(request))
            request = await asyncio.to_thread(requests.get)

    async def _await(self, request: dict[str, Any]) -> None:
        try:
            function = self._find(request["path"])
            self._children.begin()
            self._answer(request, await function(self._task_class(**request["task"])))
        except asyncio.CancelledError:
            self._send({"id": request["id"], "error": "cancelled", "kind": "cancelled", "trace": "", "children": False})
        except (Exception, SystemExit) as error:
            self._fail(request, error)
        finally:
            del self._running[request["id"]]

    def _find(self, path: str) -> Any:
        if path not in self._functions:
            self._functions[path] = find_agent(path)
        return self._functions[path]

    def _answer(self, request: dict[str, Any], result: Any) -> None:
        try:
            self._send({"id": request["id"], "result": result, "children": self._children.end()})
        except (TypeError, ValueError, RecursionError) as error:
            text = f"the agent returned {result!r:.200}, which is no JSON: {error}"
            failure = {"error": text, "kind": "result", "trace": "", "children": self._children.end(has_failed=True)}
            self._send({"id": request["id"], **failure})

    def _fail(self, request: dict[str, Any], error: BaseException) -> None:
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        left = self._children.end(has_failed=True)
        failure = {"error": message, "kind": "error", "trace": traceback.format_exc(), "children": left}
        self._send({"id": request["id"], **failure})

    def _send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            self._sink.write(line)
            self._sink.flush()


class LeftChildren:
    """Processes that episodes leave, one episode after the other."""

    def __init__(self) -> None:
        self._before: set[int] = set()
        self._left: set[int] = set()

    def begin(self) -> None:
        self._before = children()

    def end(self, *, has_failed: bool = False) -> bool:
        """Return whether the episode left processes that prevent reuse.

        What one episode leaves may be a helper that the agent keeps, such as a browser's driver; an episode that adds to
        it may have forgotten its own, and one that fails may have failed because of it.
        """
        running = children()
        new = running - self._before
        has_helper = bool(self._left & self._before)
        self._left |= new
        return bool(running) if has_failed else bool(new) and has_helper


def children() -> set[int]:
    """Return the child processes that run, and those of the process group whose parent has ended."""
    own: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            own.update(map(int, file.read_text().split()))
    group = group_members()
    known = {os.getpid(), *own, *group}
    status = {pid: read_status(pid) for pid in own | group}
    return {pid for pid, (state, parent) in status.items() if state != "Z" and (pid in own or parent not in known)}


def group_members() -> set[int]:
    """Return the other processes of the process group that this process leads, if it does."""
    members: set[int] = set()
    if os.getpgrp() == os.getpid() and os.path.isdir("/proc/self"):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended
                if os.getpgid(int(name)) == os.getpid():
                    members.add(int(name))
    return members - {os.getpid()}


def read_status(pid: int) -> tuple[str, int]:
    """Return the state and the parent of a process, as a zombie if it has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "Z", 0
    return state, int(parent)


def read_requests(source: Any, requests: Requests) -> None:
    for line in source:
        requests.put(json.loads(line))
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    sink, source = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # This file's folder is no place of the agent's modules
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    requests: Requests = queue.SimpleQueue()
    threading.Thread(target=read_requests, args=(source, requests), daemon=True).start()
    AgentServer(sink).serve(requests)


if __name__ == "__main__":
    main()
