"""Who hangs is missed; who is slow, or was stopped with its watcher, is not."""

import subprocess
import sys

from offbeat.trainer.process.heartbeat import START_S
from offbeat.trainer.process.watchdog import CHECK_INTERVAL_S, EXIT_HUNG, Watchdog


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def look_for(dog: Watchdog, clock: Clock, seconds: float) -> float:
    """What the last of many looks says."""
    hung_s = 0.0
    for _ in range(round(seconds / CHECK_INTERVAL_S)):
        clock.now += CHECK_INTERVAL_S
        hung_s = dog.hung_s()
    return hung_s


def test_a_thread_that_gives_no_sign_for_longer_than_the_limit_hangs() -> None:
    dog = Watchdog(30.0, clock=(clock := Clock()))
    dog.sign()
    assert look_for(dog, clock, 30.0) == 0
    assert look_for(dog, clock, 2.0) > 30.0
    dog.sign()
    assert look_for(dog, clock, 30.0) == 0


def test_what_starts_is_given_time_before_its_first_sign() -> None:
    dog = Watchdog(30.0, clock=(clock := Clock()))
    assert look_for(dog, clock, START_S) == 0
    assert look_for(dog, clock, 1.0) > START_S


def test_time_in_which_the_watcher_stood_still_too_does_not_count() -> None:
    dog = Watchdog(30.0, clock=(clock := Clock()))
    dog.sign()
    assert look_for(dog, clock, 20.0) == 0
    clock.now += 3600.0
    assert dog.hung_s() == 0
    assert look_for(dog, clock, 8.0) == 0
    assert look_for(dog, clock, 4.0) > 30.0


def test_a_process_whose_main_thread_hangs_ends_and_says_where() -> None:
    code = """
        import logging, threading
        from offbeat.trainer.process import watchdog
        logging.basicConfig()
        def a_hook_that_never_returns():
            threading.Event().wait()
        dog = watchdog.Watchdog(0.1)
        with watchdog.kill_if_hung(dog):
            dog.sign()
            a_hook_that_never_returns()
    """
    lines = "\n".join(line[8:] for line in code.splitlines())
    ended = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == EXIT_HUNG
    assert "the main thread has come no further" in ended.stderr
    assert "a_hook_that_never_returns" in ended.stderr
