"""Signals that end a command, raised as KeyboardInterrupt so that its child processes end first."""

import signal


def termination_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a command; without SIGHUP where it is ignored, as under `nohup`."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


def raise_interrupt_on_signals() -> None:
    """Raise KeyboardInterrupt on these signals, so that owners of processes and shared memory release them. By default,
    each signal ends the process at once, Ctrl-C of `offbeat` included."""
    for number in termination_signals():
        signal.signal(number, signal.default_int_handler)
