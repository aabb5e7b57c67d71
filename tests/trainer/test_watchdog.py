"""A hung thread is detected; a slow one, or one stopped together with its watchdog, is not."""

import subprocess
import sys

from offbeat.trainer.watchdog import CHECK_INTERVAL_S, EXIT_HUNG, STARTUP_TIMEOUT_S, Watchdog


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def advance(watchdog: Watchdog, clock: Clock, seconds: float) -> float:
    """Advance the clock in check intervals and return the last result."""
    hung_s = 0.0
    for _ in range(round(seconds / CHECK_INTERVAL_S)):
        clock.now += CHECK_INTERVAL_S
        hung_s = watchdog.hung_s()
    return hung_s


def test_a_thread_without_a_kick_within_the_timeout_hangs() -> None:
    watchdog = Watchdog(30.0, clock=(clock := Clock()))
    watchdog.kick()
    assert advance(watchdog, clock, 30.0) == 0
    assert advance(watchdog, clock, 2.0) > 30.0
    watchdog.kick()
    assert advance(watchdog, clock, 30.0) == 0


def test_the_first_kick_has_the_startup_timeout() -> None:
    watchdog = Watchdog(30.0, clock=(clock := Clock()))
    assert advance(watchdog, clock, STARTUP_TIMEOUT_S) == 0
    assert advance(watchdog, clock, 1.0) > STARTUP_TIMEOUT_S


def test_time_in_which_the_watchdog_was_descheduled_does_not_count() -> None:
    watchdog = Watchdog(30.0, clock=(clock := Clock()))
    watchdog.kick()
    assert advance(watchdog, clock, 20.0) == 0
    clock.now += 3600.0
    assert watchdog.hung_s() == 0
    assert advance(watchdog, clock, 8.0) == 0
    assert advance(watchdog, clock, 4.0) > 30.0


def test_a_hung_process_exits_and_logs_its_stack() -> None:
    code = """
        import logging, threading
        from offbeat.trainer import watchdog
        logging.basicConfig()
        def a_hook_that_never_returns():
            threading.Event().wait()
        dog = watchdog.Watchdog(0.1)
        with watchdog.kill_if_hung(dog):
            dog.kick()
            a_hook_that_never_returns()
    """
    lines = "\n".join(line[8:] for line in code.splitlines())
    ended = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == EXIT_HUNG
    assert "the main thread has made no progress" in ended.stderr
    assert "a_hook_that_never_returns" in ended.stderr
