"""A process without heartbeats is hung, unless it is starting or its reader was held up."""

import os

import pytest

from offbeat.trainer.process import heartbeat
from offbeat.trainer.process.heartbeat import Heartbeat
from offbeat.trainer.watchdog import STARTUP_TIMEOUT_S


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    return clock


def test_the_timeout_applies_after_the_first_heartbeat(clock: Clock) -> None:
    one = Heartbeat(timeout_s=8.0)
    clock.now += 500
    assert one.silence_s() == 0
    os.write(one.write_end, b".")
    assert one.silence_s() == 0
    clock.now += 8
    assert one.silence_s() == 0
    clock.now += 1
    assert one.silence_s() == 9


def test_a_process_without_a_first_heartbeat_hangs(clock: Clock) -> None:
    one = Heartbeat(timeout_s=8.0)
    clock.now += STARTUP_TIMEOUT_S + 1
    assert one.silence_s() == STARTUP_TIMEOUT_S + 1


def test_heartbeats_in_the_pipe_are_read_before_silence_is_measured(clock: Clock) -> None:
    one = Heartbeat(timeout_s=8.0)
    os.write(one.write_end, b".")
    assert one.silence_s() == 0
    clock.now += 50
    os.write(one.write_end, b"...")
    assert one.silence_s() == 0
