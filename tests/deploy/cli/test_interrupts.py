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

HIDDEN, SHOWN, DRAWN = b"\x1b[?25l", b"\x1b[?25h", b"\x1b[2K"

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
            self.read_more()

    def read_more(self) -> None:
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


def test_an_interrupted_rollout_ends_at_once_without_a_traceback_and_the_cursor_is_visible(tmp_path: Path) -> None:
    """Also while it looks for the tasks of so many episodes."""
    terminal = Terminal(tmp_path, "rollout", "quickstart", "--agent", "random", "--episodes", "100000")
    terminal.read_until(b"collecting")
    while terminal.output.count(DRAWN) < 4:
        terminal.read_more()
    assert terminal.interrupt() == 130
    assert terminal.output.rindex(SHOWN) > terminal.output.rindex(HIDDEN)
    assert b"Traceback" not in terminal.output
