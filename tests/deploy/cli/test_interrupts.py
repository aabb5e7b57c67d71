"""Ctrl-C in a terminal."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until_sync

pytestmark = pytest.mark.slow


class Terminal:
    """`offbeat` in a terminal of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._screen, slave = pty.openpty()
        command = [sys.executable, "-m", "offbeat.deploy.cli.app", *arguments]
        env = os.environ | {"TERM": "xterm"}
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=env)
        os.close(slave)
        self.output = b""

    def read_until(self, text: bytes) -> None:
        while text not in self.output:
            assert self._read(), self.output

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        while self._read():
            pass
        os.close(self._screen)
        return self.process.wait()

    def _read(self) -> bytes:
        try:
            part = os.read(self._screen, 4096)
        except OSError:  # closed at the other end
            part = b""
        self.output += part
        return part


def test_a_person_who_leaves_an_episode_closes_its_env(tmp_path: Path) -> None:
    (tmp_path / "closing.py").write_text(
        """
import gymnasium
from gymnasium.spaces import Text

class Closing(gymnasium.Env):
    observation_space = action_space = Text(9)

    def reset(self, *, seed=None, options=None):
        return "hello", {}

    def step(self, action):
        return "again", 0.0, False, False, {}

    def close(self):
        print("env closed", flush=True)
"""
    )
    terminal = Terminal(tmp_path, "play", "closing:Closing")
    terminal.read_until(b"> ")
    wait_until_sync(lambda: psutil.Process(terminal.process.pid).status() == psutil.STATUS_SLEEPING)
    assert terminal.interrupt() == 0
    assert terminal.output.endswith(b"left before the end\r\nenv closed\r\n")
