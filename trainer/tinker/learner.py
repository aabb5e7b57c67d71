"""The learner's loop: applies the models' commands round-robin.

Invariant: after a kill at any moment, a successor applies each acknowledged command once, to the same weights.
"""

import logging
import time
from collections import OrderedDict

from offbeat.services.tinker.log import CommandLog
from offbeat.trainer.tinker.executor import Executor

logger = logging.getLogger(__name__)

WAIT_S = 0.5
CLOSE_INTERVAL_S = 5.0
SAVE_INTERVAL_S = 20.0
"""Interval between states of a busy model; a successor repeats later commands."""


class TinkerLearner:
    def __init__(self, log: CommandLog, executor: Executor) -> None:
        self._log = log
        self._executor = executor
        self._busy: OrderedDict[str, None] = OrderedDict()
        """Models that may have commands, by turn."""
        self._unsaved: dict[str, float] = {}
        """Models with unsaved commands, and since when."""
        self._is_stopped = False
        self._closed_at = 0.0

    def stop(self) -> None:
        self._is_stopped = True

    def run(self) -> None:
        """Apply commands until stopped, then save; raises FencedError after a takeover."""
        self._log.take_over()
        self._executor.discard(self._log.closed())
        self._busy = OrderedDict.fromkeys(each for each in self._log.model_ids() if self._log.logged(each))
        while not self._is_stopped:
            if not self._busy:
                self._busy.update(dict.fromkeys(sorted(self._log.wait(WAIT_S))))
            elif woken := self._log.poll():
                self._busy.update(dict.fromkeys(sorted(woken - self._busy.keys())))
            if self._busy:
                model_id, _ = self._busy.popitem(last=False)
                if self._apply_next(model_id):
                    self._busy[model_id] = None
            self._save_due()
            self._close_ended()
        for model_id in list(self._unsaved):
            self._save(model_id)

    def _apply_next(self, model_id: str) -> bool:
        seq_id = self._executor.contained(model_id) + 1
        data = self._log.take_up(model_id, seq_id)
        if data is None:
            return False
        record = self._log.model(model_id)
        outcome = self._executor.apply(model_id, record, seq_id, data)
        self._log.commit(model_id, record.owner, seq_id, outcome.result, outcome.writes)
        self._unsaved.setdefault(model_id, time.monotonic())
        return True

    def _save_due(self) -> None:
        now = time.monotonic()
        for model_id, since in list(self._unsaved.items()):
            if now - since >= SAVE_INTERVAL_S:
                self._save(model_id)

    def _close_ended(self) -> None:
        """Close the models of ended sessions, once their commands are applied, and delete what is theirs."""
        if time.monotonic() - self._closed_at < CLOSE_INTERVAL_S:
            return
        self._closed_at = time.monotonic()
        for session_id, model_ids in self._log.ended().items():
            closed = [model_id for model_id in model_ids if self._log.close(model_id)]
            for model_id in closed:
                self._unsaved.pop(model_id, None)
                self._busy.pop(model_id, None)
            self._executor.discard(closed)
            if len(closed) == len(model_ids):
                self._log.forget_session(session_id)

    def _save(self, model_id: str) -> None:
        contained = self._executor.save(model_id)
        self._log.truncate(model_id, [each for each in self._log.logged(model_id) if each <= contained])
        del self._unsaved[model_id]
