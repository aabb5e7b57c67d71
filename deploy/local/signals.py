"""Which signals end a command, and how what it has started ends first."""

import signal


def ending_signals() -> tuple[signal.Signals, ...]:
    """Those by which people and supervisors end a command; without SIGHUP where it is ignored, as under `nohup`."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


def interrupt_at_signals() -> None:
    """From now on they raise KeyboardInterrupt, so that whatever holds processes or shared memory lets go of them. Otherwise
    each of them ends the process at once, Ctrl-C of `offbeat` too."""
    for number in ending_signals():
        signal.signal(number, signal.default_int_handler)
