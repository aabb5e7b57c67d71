"""Forks that run Python programs, of a process that has imported a learner's libraries: `python -m tests.fork_server FD`.

An interpreter of its own would import them for six seconds of CPU. `tests.forked` is the client.
"""

import json
import os
import runpy
import signal
import socket
import sys
from typing import Any

from offbeat.services.process import uncollected_imports

MAX_REQUEST_BYTES = 1 << 17


def import_libraries() -> None:
    with uncollected_imports():
        import deepspeed  # noqa: F401
        from transformers.models.qwen2 import modeling_qwen2, tokenization_qwen2  # noqa: F401

        from offbeat.trainer.engines import deepspeed as engine  # noqa: F401
        from offbeat.trainer.process import learner_process  # noqa: F401


def serve(client: socket.socket) -> dict[str, Any]:
    """Fork for every program, and return it in the fork; tell exit codes; exit with the client."""
    while True:
        data, outputs, _, _ = socket.recv_fds(client, MAX_REQUEST_BYTES, 2)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if "pid" in request:
            ended, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        elif (answer := os.fork()) == 0:
            client.close()
            for number, output in enumerate(outputs, start=1):
                os.dup2(output, number)
                os.close(output)
            return request
        for output in outputs:
            os.close(output)
        client.send(json.dumps(answer).encode())


def run(arguments: list[str], environment: dict[str, str], folder: str, *, new_session: bool) -> None:
    """Run what `python` with these arguments runs: a script, `-m MODULE` or `-c CODE`."""
    if new_session:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    match arguments:
        case ["-m", module, *_]:
            sys.argv, sys.path[0] = arguments[1:], folder
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.argv, sys.path[0] = ["-c", *rest], folder
            exec(code, {"__name__": "__main__"})
        case _:
            sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
            runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)  # in a terminal, Ctrl-C reaches the tests' whole group
    import_libraries()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, interrupted)
    run(**request)
