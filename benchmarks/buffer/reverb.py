"""Reverb in a child process with its own venv."""

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from offbeat.benchmarks.buffer.load import GroupLoad, Rates, expect
from offbeat.benchmarks.harness.venv import GuestVenv

REVERB_VENV = GuestVenv("reverb", "Reverb", ("dm-reverb[tensorflow]==0.14.0", "tensorflow==2.15.1", "numpy==1.26.4"))
GUEST = Path(__file__).parent / "reverb_worker" / "queue_server.py"


class ReverbError(Exception):
    """Reverb's failure, with its output."""


class Reverb:
    def __init__(self, python: Path, log: Path) -> None:
        self._command = [str(python), str(GUEST)]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
            )
        try:
            self._answer()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end()

    def side(self, load: GroupLoad) -> Rates:
        assert self._process is not None, "use `with`"
        assert self._process.stdin is not None
        lengths = [[len(blob) for blob in row] for row in load.blobs]
        with suppress(BrokenPipeError):  # its end is reported below
            self._process.stdin.write(json.dumps(lengths).encode() + b"\n")
            for row in load.blobs:
                self._process.stdin.writelines(row)
            self._process.stdin.flush()
        reply = self._answer()
        expect(int(reply["trajectories"]), sum(map(len, lengths)), "trajectories")
        return Rates(load.num_groups / reply["into_s"], load.num_groups / reply["out_s"])

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None, "use `with`"
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace").strip()[-500:]
            raise ReverbError(f"its process ended with {self._process.wait()}: {tail}")
        return json.loads(line)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # the last message was not read
                    pipe.close()
