"""Whoever gives no sign of life hangs; whoever starts, or was merely not listened to, does not."""

import os

import pytest

from offbeat.trainer.process import heartbeat
from offbeat.trainer.process.heartbeat import Heartbeat


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    return clock


def test_a_process_may_start_for_long_and_must_then_give_signs(clock: Clock) -> None:
    one = Heartbeat(silent_s=8.0)
    clock.now += 500
    assert one.silence_s() == 0
    os.write(one.write_end, b".")
    assert one.silence_s() == 0
    clock.now += 8
    assert one.silence_s() == 0
    clock.now += 1
    assert one.silence_s() == 9


def test_a_process_that_never_gives_a_sign_hangs_too(clock: Clock) -> None:
    one = Heartbeat(silent_s=8.0)
    clock.now += heartbeat.START_S + 1
    assert one.silence_s() == heartbeat.START_S + 1


def test_a_reader_that_was_held_up_sees_the_signs_that_lie_there(clock: Clock) -> None:
    one = Heartbeat(silent_s=8.0)
    os.write(one.write_end, b".")
    assert one.silence_s() == 0
    clock.now += 50
    os.write(one.write_end, b"...")
    assert one.silence_s() == 0
