"""Termination signals interrupt a command."""

import os
import signal
from collections.abc import Iterator

import pytest

from offbeat.deploy.local.signals import raise_interrupt_on_signals, termination_signals


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_termination_signals_raise_keyboard_interrupt(number: signal.Signals):
    raise_interrupt_on_signals()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def test_hangup_is_ignored_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_interrupt_on_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    assert termination_signals() == (signal.SIGINT, signal.SIGTERM)
