"""Termination signals, raised as KeyboardInterrupt so that a command cleans up before it exits."""

import signal


def termination_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a command, without SIGHUP if it is ignored (`nohup`)."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


def raise_interrupt_on_signals() -> None:
    """Raise KeyboardInterrupt on termination signals, so that processes and shared memory are cleaned up."""
    for number in termination_signals():
        signal.signal(number, signal.default_int_handler)
