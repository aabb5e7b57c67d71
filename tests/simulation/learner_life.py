"""A learner's process in a simulation, whose thread stops wherever its world may act."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, Literal, Protocol

from offbeat.services.redis.lease import LearnerLease
from tests.simulation.stopped_files import KilledError, at_each


class Surroundings(Protocol):
    """What a life needs of its world."""

    folder: Path

    def act(self, life: "Life") -> None:
        """Do what the seed wants between two operations of a learner."""
        ...

    def lead(self, life: "Life") -> None:
        """Be a learner until it is finished."""
        ...


class DeferredExecutor(Executor):
    """Background work that is done when the seed, or who waits for it, says so."""

    def __init__(self, life: "Life") -> None:
        self._life = life

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future = DeferredFuture(lambda: fn(*args, **kwargs))
        self._life.work.append(future)
        return future


class DeferredFuture(Future[Any]):
    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work = work
        self._has_begun = False

    def do(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        try:
            self.set_result(self._work())
        except Exception as error:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        self.do()
        return super().result(timeout)


class Life:
    """One learner's process, from its start to its end or death."""

    def __init__(self, world: "Surroundings") -> None:
        self._world = world
        self._may_run, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._live, daemon=True)
        self._inside = self._is_dead = False
        self.in_background = False
        self.work: list[DeferredFuture] = []
        self.outcome: Literal["", "finished", "killed"] = ""
        self.error: BaseException | None = None
        self.lease: LearnerLease | None = None
        self.thread.start()

    @property
    def has_ended(self) -> bool:
        return bool(self.outcome or self.error)

    def go(self) -> None:
        """Let it run until it is paused or ends."""
        self._may_run.release()
        self._has_stopped.acquire()

    def pause(self) -> None:
        self._has_stopped.release()
        self._may_run.acquire()

    def kill(self) -> None:
        """Mark it as dead: it does nothing more."""
        self._is_dead = True

    def moment(self) -> None:
        """Let the world act before a command, a file operation or a sync of this process."""
        if self._inside or threading.current_thread() is not self.thread:
            return
        self._inside = True
        try:
            if not self._is_dead:
                self._world.act(self)
        finally:
            self._inside = False
        if self._is_dead:
            raise KilledError

    def do_background_work(self) -> None:
        """Do the oldest work, in which the world may act, too."""
        self.work = [each for each in self.work if not each.done()]
        if not self.work or self.in_background:
            return
        self.in_background, self._inside = True, False
        try:
            self.work[0].do()
        finally:
            self.in_background, self._inside = False, True

    def _live(self) -> None:
        self._may_run.acquire()
        try:
            at_each(lambda: self._world.lead(self), self._world.folder, self.moment)
            self.outcome = "finished"
        except KilledError:
            self.outcome = "killed"
        except BaseException as error:
            self.error = error
        finally:
            self._has_stopped.release()
