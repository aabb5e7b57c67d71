"""Rules of workers, those taken for dead included."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from offbeat.services.buffer.api import SubmitResult
from offbeat.services.errors import ReconcileError
from offbeat.services.messages.types import EpisodeKind
from tests.simulation.actors import NAMES, Played, Worker


class WorkerRules(Played):
    """Workers that claim, submit, fail and die."""

    def _waits(self, name: str) -> bool:
        """Return whether the worker is refused until a learner has reconciled the data."""
        if not self._is_pending():
            return False
        with pytest.raises(ReconcileError):
            self.runner.run(self.workers[name].buffer.heartbeat(name))
        return True

    @rule(name=st.sampled_from(NAMES), limit=st.integers(1, 7), answer_lost=st.sampled_from([False, False, True]))
    def claim(self, name: str, limit: int, answer_lost: bool) -> None:
        worker = self.workers[name]
        if self._waits(name):
            return
        tasks = self.runner.run(worker.buffer.claim(name, limit))
        if answer_lost:
            worker.buffer._nonces[name] -= 1
            for task in tasks:
                worker.buffer._forget(name, task)
        else:
            worker.held += tasks
            for task in tasks:
                self._read_samples(name, worker.buffer, task)
        for task in tasks:
            assert task.kind is EpisodeKind.EVAL or 0 <= task.min_version <= self.published

    @rule(name=st.sampled_from(NAMES), pick=st.integers(0, 99), lag=st.integers(0, 1))
    def submit(self, name: str, pick: int, lag: int) -> None:
        worker = self.workers[name]
        if worker.held and not self._waits(name):
            task = worker.held.pop(pick % len(worker.held))
            self._hand_in(name, worker.buffer, task, lag)

    @rule(name=st.sampled_from(NAMES), rest=st.integers(0, 3))
    def play_on(self, name: str, rest: int) -> None:
        """Claim all there is and submit all but `rest`."""
        self.claim(name, 50, answer_lost=False)
        while len(self.workers[name].held) > rest and not self._is_pending():
            self.submit(name, rest, 0)

    @rule(pick=st.integers(0, 99))
    def submit_again(self, pick: int) -> None:
        if self.submitted and not self._is_pending():
            name, task, samples = self.submitted[pick % len(self.submitted)]
            result = self._hand_in(name, self.workers[name].buffer, task, 0, samples)
            assert self.has_lost or result in (SubmitResult.DUPLICATE, SubmitResult.LATE)

    @precondition(lambda self: self.ghosts)
    @rule(pick=st.integers(0, 99), lag=st.integers(0, 1))
    def submit_from_a_worker_thought_dead(self, pick: int, lag: int) -> None:
        if self._is_pending():
            return
        name, task, buffer = self.ghosts.pop(pick % len(self.ghosts))
        self._hand_in(name, buffer, task, lag)

    @rule(name=st.sampled_from(NAMES), pick=st.integers(0, 99))
    def fail(self, name: str, pick: int) -> None:
        worker = self.workers[name]
        if worker.held and not self._waits(name):
            task = worker.held.pop(pick % len(worker.held))
            self.runner.run(worker.buffer.fail(name, task, "boom"))

    @rule(name=st.sampled_from(NAMES))
    def heartbeat(self, name: str) -> None:
        worker = self.workers[name]
        if self._waits(name):
            return
        for task in self.runner.run(worker.buffer.heartbeat(name)).cancelled:
            worker.held.remove(task)

    @rule(name=st.sampled_from(NAMES))
    def release(self, name: str) -> None:
        worker = self.workers[name]
        if self._waits(name):
            return
        self.runner.run(worker.buffer.release(name))
        worker.held.clear()

    @rule(name=st.sampled_from(NAMES), silently=st.booleans())
    def worker_dies(self, name: str, silently: bool) -> None:
        worker = self.workers[name]
        self.ghosts += [(name, task, worker.buffer) for task in worker.held]
        self.workers[name] = Worker(self.run.other_worker())
        if silently:
            self.run.silence(name)

    @rule(name=st.sampled_from(NAMES))
    def worker_is_duplicated(self, name: str) -> None:
        """A second process of its name plays the same episodes."""
        first, second = self.workers[name], self.run.other_worker()
        self.ghosts += [(name, task, second) for task in first.held]
        self.samples |= {(second, task): self.samples[first.buffer, task] for task in first.held if task.is_scoring}
