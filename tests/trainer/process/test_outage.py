"""A learner waits for a service that is down, says so once, and can be stopped."""

import threading

from offbeat.trainer.learner.progress_view import SilentView
from offbeat.trainer.process.outage import Outage
from offbeat.trainer.watchdog import Watchdog


class Printed(SilentView):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, text: str) -> None:
        self.lines.append(text)


def test_an_outage_is_printed_once_and_keeps_the_watchdog_quiet() -> None:
    now, view = 0.0, Printed()
    watchdog = Watchdog(1.0, clock=lambda: now)
    outage = Outage("Weights store", (threading.Event(),), watchdog, view)
    for _ in range(1000):
        now += 1.0
        assert outage.should_retry(ConnectionError("refused."))
        assert watchdog.hung_s() == 0
    assert view.lines == ["Weights store unavailable: refused. Training resumes when it is back."]


def test_any_reason_to_stop_ends_the_wait() -> None:
    stop, lost = threading.Event(), threading.Event()
    outage = Outage("Redis", (stop, lost), Watchdog(1.0), SilentView())
    assert outage.should_retry(ConnectionError())
    lost.set()
    assert not outage.should_retry(ConnectionError())


def test_a_failure_after_a_silence_is_another_outage() -> None:
    view = Printed()
    outage = Outage("Redis", (), Watchdog(1.0), view, new_after_s=-1.0)
    outage.should_retry(ConnectionError("first"))
    outage.should_retry(ConnectionError("second"))
    assert [line.split(": ")[1].split(".")[0] for line in view.lines] == ["first", "second"]
