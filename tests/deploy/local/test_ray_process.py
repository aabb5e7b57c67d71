"""Ray's start is tried again where time alone was short, on clean ground."""

import subprocess
import sys

import psutil
import pytest

from offbeat.deploy.local.ray_process import (
    AGAIN,
    STARTS,
    TOO_SLOW,
    patiently,
)

SLEEPS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1000)"]
RAYS_WORDS = f"The current node {TOO_SLOW}. This could happen because some of the raylet failed to startup"


def test_a_start_that_was_too_slow_is_tidied_up_and_tried_again():
    """In a process of its own, as in life: it ends all that it has started."""
    code = f"""
        import subprocess, psutil
        from offbeat.deploy.local.ray_process import patiently
        children, said = [], []
        def start():
            assert all(child.poll() is not None for child in children), "what the last start left has been ended"
            child = subprocess.Popen({SLEEPS!r}, stdout=subprocess.PIPE)
            child.stdout.readline()
            children.append(child)
            if len(children) < 3:
                raise Exception({RAYS_WORDS!r})
        patiently(start, said.append)
        assert children[-1].poll() is None
        print(len(children), said)
        children[-1].kill()
    """
    lines = "\n".join(line[8:] for line in code.splitlines())
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == f"3 {[AGAIN, AGAIN]}", done.stderr
    assert done.stderr.count(TOO_SLOW) == 2


def test_it_is_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offbeat.deploy.local.ray_process._tidy", lambda: None)
    said: list[str] = []

    def start() -> None:
        raise RuntimeError(RAYS_WORDS)

    with pytest.raises(RuntimeError, match=TOO_SLOW):
        patiently(start, said.append)
    assert said == [AGAIN] * (STARTS - 1)


def test_what_has_another_reason_is_not_tried_again():
    before = {child.pid for child in psutil.Process().children()}

    def start() -> None:
        raise ValueError("no such option")

    with pytest.raises(ValueError, match="option"):
        patiently(start, lambda _: pytest.fail("it is not tried again"))
    assert {child.pid for child in psutil.Process().children()} == before
