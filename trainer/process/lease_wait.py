"""Waits for the learner's lease, showing its holder, until the run is over."""

import time
from collections.abc import Callable

from offbeat.services.redis.lease import LearnerLease, LeaseHeldError
from offbeat.trainer.learner.progress_view import LearnerView

LOOK_S = 1.0
"""Upper bound of the delay with which a stop or the end of the run is noticed."""


def wait_for_lease(lease: LearnerLease, view: LearnerView, given_up: Callable[[], bool]) -> bool:
    """Acquire the lease as soon as it is free; return False if `given_up` becomes true first.

    Raises:
        RetryableError: Redis does not answer.
    """
    shown = ""
    while not given_up():
        try:
            lease.acquire(wait_s=LOOK_S)
        except LeaseHeldError as held:
            if held.owner != shown:
                shown = held.owner
                view.say(_notice(held))
            continue
        if shown:
            view.say("The lease is free: this learner has it now.")
        return True
    return False


def _notice(held: LeaseHeldError) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(held.since))
    return (
        f"Another learner holds this run: {held.owner}, since {clock} ({_duration(time.time() - held.since)} ago).\n"
        "This one stands by and takes over when that one detaches, finishes or dies."
    )


def _duration(seconds: float) -> str:
    whole = max(0, int(seconds))
    minutes, hours = whole // 60, whole // 3600
    return f"{whole} s" if minutes < 2 else f"{minutes} min" if hours < 2 else f"{hours} h"
