import contextlib
import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from offbeat.services.rollout.agents.command_main import MAX_OUTPUT_BYTES, run
from offbeat.services.rollout.agents.task import MAX_VARIABLE_BYTES, AgentTask
from tests.memory import measure_memory


class Handler(BaseHTTPRequestHandler):
    """Closes each connection behind its answer without a word of it, as a server does that was not asked for long."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        action = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["action"]
        reply = json.dumps({"observation": action, "reward": 0.0, "done": False, "metrics": {}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class MeetingHandler(Handler):
    """Answers steps only once two are under way."""

    both = threading.Barrier(2)

    def do_POST(self) -> None:
        self.both.wait(60)
        super().do_POST()
        self.close_connection = False


class FallingHandler(Handler):
    """Hangs up on the first step without an answer."""

    num_calls = 0

    def do_POST(self) -> None:
        FallingHandler.num_calls += 1
        if FallingHandler.num_calls == 1:
            self.close_connection = True
        else:
            super().do_POST()


class Server(ThreadingHTTPServer):
    """Tells when it has closed a connection."""

    daemon_threads = True

    def __init__(self, handler: type[Handler] = Handler) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.closed = threading.Event()

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.closed.set()


@contextlib.contextmanager
def serving(handler: type[Handler] = Handler) -> Iterator[tuple[Server, AgentTask]]:
    with Server(handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        origin = f"http://127.0.0.1:{server.server_port}"
        try:
            yield server, AgentTask(f"{origin}/v1", "key", origin, f"{origin}/env", "policy", "Tag", 1, "", "", 3)
        finally:
            server.shutdown()
            thread.join()


def test_steps_of_parallel_tool_calls_get_their_own_replies():
    """As frameworks make the calls of one answer, in threads."""
    with serving(MeetingHandler) as (_, task), ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            replies = list(threads.map(task.step, ("Left", "Right")))
            assert [reply.observation for reply in replies] == ["Left", "Right"]
        assert pickle.loads(pickle.dumps(AgentTask.of(task.plain()))) == task


def test_a_step_that_failed_leaves_the_next_ones_alone():
    with serving(FallingHandler) as (_, task):
        with pytest.raises(ConnectionError):
            task.step("Left")
        assert task.step("Right").observation == "Right"


def test_an_agent_survives_the_timeout_of_its_idle_connection():
    with serving() as (server, task):
        for action in ("Left", "Right", "Up"):
            assert task.step(action).observation == action
            assert server.closed.wait(60)
            server.closed.clear()
            assert AgentTask.of(json.loads(task.environment()["OFFBEAT_TASK"])) == task


def test_only_the_end_of_a_commands_output_is_retained():
    much = "[print('x' * 2**16, file=file) for file in (sys.stdout, sys.stderr) for _ in range(512)]"
    says = f"import sys; {much}; print('{{\"reward\": 1}}')"
    plain = AgentTask("", "", "", "", "policy", "Tag", 1, "", "", 3).plain()
    assert measure_memory(lambda: run([sys.executable, "-c", says], plain))[1] < 16 * MAX_OUTPUT_BYTES
    assert run([sys.executable, "-c", says], plain) == {"reward": 1}
    with pytest.raises(RuntimeError, match=r"exit status 3: .*no such room"):
        run([sys.executable, "-c", "import sys; print('no such room', file=sys.stderr); sys.exit(3)"], plain)


@pytest.mark.parametrize("char", ["\u2028", "\x85"])
def test_a_commands_result_ends_at_its_newline(char: str):
    """JSON may have other line separators as they are."""
    plain = AgentTask("", "", "", "", "policy", "Tag", 1, "", "", 3).plain()
    says = f"import json; print('noise'); print(json.dumps({{'answer': 'a{char}b'}}, ensure_ascii=False), end='\\r\\n')"
    assert run([sys.executable, "-X", "utf8", "-c", says], plain) == {"answer": f"a{char}b"}


@pytest.mark.parametrize(("over", "has_variable"), [(0, True), (1, False)])
def test_a_task_too_long_for_the_environment_is_read_from_stdin(over: int, has_variable: bool):
    """Linux starts no program with a variable of more than 131,072 bytes."""
    task = AgentTask("", "", "", "", "policy", "Tag", 1, "", "é" * 20_000, 3)
    room = MAX_VARIABLE_BYTES - 1 - len(f"OFFBEAT_TASK={json.dumps(task.plain())}")
    task.observation += "x" * (room + over)
    reads = "import json, os, sys; print(json.dumps([json.load(sys.stdin), 'OFFBEAT_TASK' in os.environ]))"
    assert run([sys.executable, "-c", reads], task.plain()) == [task.plain(), has_variable]


def test_a_command_ends_before_the_children_that_hold_its_pipes():
    """A child with its stdin blocks the writer of a long task, one with its stdout the reader."""
    plain = AgentTask("", "", "", "", "policy", "Tag", 1, "", "x" * 2**20, 3).plain()
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20); print(-1)'])"
    pid = run([sys.executable, "-c", f"import subprocess, sys; print({child}.pid)"], plain)
    assert pid > 0
    os.kill(pid, signal.SIGKILL)
