import time
from collections.abc import Callable

from offbeat.services.redis.lease import LearnerLease, LeaseHeldError
from offbeat.trainer.learner.progress_view import LearnerView

CHECK_INTERVAL_S = 1.0


def wait_for_lease(lease: LearnerLease, view: LearnerView, should_stop: Callable[[], bool]) -> bool:
    """Acquire the lease when free; return False if stopped.

    Raises:
        RetryableError: no reply from Redis.
    """
    shown_owner = ""
    while not should_stop():
        try:
            lease.acquire(wait_s=CHECK_INTERVAL_S)
        except LeaseHeldError as held:
            if held.owner != shown_owner:
                shown_owner = held.owner
                view.print(_notice(held))
            continue
        if shown_owner:
            view.print("The lease is free: this learner has taken over.")
        return True
    return False


def _notice(held: LeaseHeldError) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(held.since))
    return (
        f"Another learner holds this run: {held.owner}, since {clock} ({_duration(time.time() - held.since)} ago).\n"
        "This learner is on standby: it takes over when the other detaches, finishes or dies."
    )


def _duration(seconds: float) -> str:
    count = max(0, int(seconds))
    minutes, hours = count // 60, count // 3600
    return f"{count} s" if minutes < 2 else f"{minutes} min" if hours < 2 else f"{hours} h"
