"""Termination signals."""

import signal


def termination_signals() -> tuple[signal.Signals, ...]:
    """Return termination signals, without ignored SIGHUP (`nohup`)."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


def raise_interrupt_on_signals() -> None:
    """Raise KeyboardInterrupt on termination signals."""
    for number in termination_signals():
        signal.signal(number, signal.default_int_handler)
