"""The learner's loop: applies the models' commands round-robin; gradients of several models may share a pass.

Invariant: after a kill at any moment, a successor applies each acknowledged command once, to the same weights. What has a
result is repeated as it was computed first; a shared pass is stored with the result.
"""

import logging
import shutil
import time
from collections import OrderedDict
from contextlib import suppress
from threading import Thread

from redis.exceptions import RedisError

from offbeat.services.redis.errors import complaint
from offbeat.services.tinker.log import CommandLog
from offbeat.services.tinker.records import RefusedCommand, Result, encode_command
from offbeat.trainer.tinker.executor import CommandOutcome, Executor, QueuedCommand, StateNotSavedError
from offbeat.trainer.tinker.shared_pass import GradientBatch

logger = logging.getLogger(__name__)

WAIT_S = 0.5
TIDY_INTERVAL_S = 5.0
SAVE_INTERVAL_S = 20.0
"""Interval between states of a busy model; a successor repeats later commands."""
ROOM_INTERVAL_S = 5.0
"""Interval of tries to write a state for which there was no room; no command is applied meanwhile."""
LOG_INTERVAL_S = 60.0
MAX_DEATHS = 3
"""Learners that may die of a command, which is refused then."""
DEADLY = (
    f"the learner died {MAX_DEATHS} times while it applied this command, for want of memory perhaps: send fewer or shorter "
    "sequences at once"
)
LOST_RESULT = "Redis has lost the result of this command, which is in the model's weights"


class TinkerLearner:
    def __init__(self, log: CommandLog, executor: Executor, shared_pass_tokens: int) -> None:
        """shared_pass_tokens: limit of a pass that models share, 0: they share none."""
        self._log = log
        self._executor = executor
        self._shared_pass_tokens = shared_pass_tokens
        self._applied_before: dict[str, int] = {}
        """Last command by model that a predecessor has applied."""
        self._busy: OrderedDict[str, None] = OrderedDict()
        """Models that may have commands, the next one first."""
        self._unsaved: dict[str, float] = {}
        """Models with unsaved commands, and since when."""
        self._is_stopped = False
        self._tidied_at = 0.0
        self._waits_until = 0.0
        """Time of the next try to save. Monotonic, like the other times here."""
        self._reported_at = float("-inf")

    def stop(self) -> None:
        self._is_stopped = True

    def stop_by_signal(self, *_: object) -> None:
        """Stop; a kill that follows is no death of the command that is applied now."""
        self.stop()
        Thread(target=self._report_idle, daemon=True).start()  # this one may be in a call of Redis' client

    def _report_idle(self) -> None:
        with suppress(RedisError):  # without Redis the death counts, as it would without a signal
            self._log.report_idle()

    def should_retry(self, error: Exception) -> bool:
        """Report that Redis is unavailable; return False once the learner should stop."""
        self._report_wait(complaint(error))
        return not self._is_stopped

    def run(self) -> None:
        """Apply commands until stopped, then save; raises FencedError after a takeover."""
        self._log.take_over()
        self._executor.discard(self._log.closed())
        logged = sorted(self._log.logged_models())
        self._applied_before = {each: self._log.applied(each) for each in logged}
        self._busy = OrderedDict.fromkeys(logged)
        while not self._is_stopped:
            is_waiting = time.monotonic() < self._waits_until
            woken = self._log.poll() if self._busy and not is_waiting else self._log.wait(WAIT_S)
            self._busy.update(dict.fromkeys(sorted(woken - self._busy.keys())))
            if not is_waiting:
                self._take_turn()
            self._tidy()
        for model_id in list(self._unsaved):
            self._save(model_id)

    def _take_turn(self) -> None:
        """Save what is due, and apply the next command of the first busy model."""
        try:
            self._save_due()
            if self._busy and not self._is_stopped:
                model_id, _ = self._busy.popitem(last=False)
                if self._apply_next(model_id):
                    self._busy[model_id] = None
        except StateNotSavedError as error:  # `_tidy` may make room, and returns the model to the busy ones
            self._report_wait(str(error))
            self._log.report_idle()
            self._waits_until = time.monotonic() + ROOM_INTERVAL_S

    def _apply_next(self, model_id: str) -> bool:
        """Apply a model's next command, if it has come, and gradients of others that fit into its pass."""
        seq_id = self._executor.contained(model_id) + 1
        data = self._log.take_up(model_id, seq_id)
        if data is None:
            return False
        queued = self._read_queued(model_id, seq_id, data)
        commands, batches = self._share(queued)
        if len(commands) > 1:
            self._log.report(model_id, seq_id, {each.model_id: each.seq_id for each in commands[1:]})
            outcomes = self._executor.apply_shared(commands, batches)
        else:
            outcomes = [self._executor.apply(queued)]
        for each, outcome in zip(commands, outcomes, strict=True):
            self._commit(each, outcome)
            self._unsaved.setdefault(each.model_id, time.monotonic())
            if each is not queued:
                self._busy.move_to_end(each.model_id)
        return True

    def _commit(self, queued: QueuedCommand, outcome: CommandOutcome) -> None:
        model_id, seq_id, owner = queued.model_id, queued.seq_id, queued.record.owner
        self._log.commit(model_id, owner, seq_id, outcome.result, outcome.writes, outcome.discarded)
        if queued.first is not None and outcome.applied is not None:
            self._log.compare_repeated(model_id, seq_id, queued.first, outcome.applied)

    def _read_queued(self, model_id: str, seq_id: int, data: bytes) -> QueuedCommand:
        is_repeated = self._is_repeated(model_id, seq_id)
        shared = self._log.shared_pass(model_id, seq_id) if is_repeated else None
        first = self._log.applied_command(model_id, seq_id) if is_repeated else None
        if self._log.deaths(model_id, seq_id) >= MAX_DEATHS:
            data = encode_command(RefusedCommand(DEADLY))
        return QueuedCommand(model_id, self._log.model(model_id), seq_id, data, shared, first)

    def _is_repeated(self, model_id: str, seq_id: int) -> bool:
        return seq_id <= self._applied_before.get(model_id, -1)

    def _may_share(self, model_id: str, seq_id: int) -> bool:
        """Return whether a command's pass may be shared: learners must not die of it with others'."""
        return not self._is_repeated(model_id, seq_id) and not self._log.deaths(model_id, seq_id)

    def _share(self, queued: QueuedCommand) -> tuple[list[QueuedCommand], list[GradientBatch]]:
        """Return the commands of a pass: the first, and those of the models after it that fit."""
        left, commands, batches = self._shared_pass_tokens, [queued], list[GradientBatch]()
        if not left or not self._may_share(queued.model_id, queued.seq_id):
            return commands, batches
        batch = self._executor.read_gradient(queued)
        if batch is None or batch.num_tokens >= left:
            return commands, batches
        batches.append(batch)
        left -= batch.num_tokens
        for model_id in self._busy:
            seq_id = self._executor.contained(model_id) + 1 if self._executor.has_loaded(model_id) else 0
            if not seq_id or not self._may_share(model_id, seq_id):
                continue
            if (data := self._log.command(model_id, seq_id)) is None:
                continue
            other = self._read_queued(model_id, seq_id, data)
            batch = self._executor.read_gradient(other)
            if batch is not None and batch.num_tokens <= left:
                commands.append(other)
                batches.append(batch)
                left -= batch.num_tokens
        return commands, batches

    def _save_due(self) -> None:
        now = time.monotonic()
        for model_id, since in list(self._unsaved.items()):
            if now - since >= SAVE_INTERVAL_S:
                self._save(model_id)

    def _tidy(self) -> None:
        if time.monotonic() - self._tidied_at < TIDY_INTERVAL_S:
            return
        self._tidied_at = time.monotonic()
        self._go_back()
        # A wakeup is lost with the connection on which it was sent
        self._busy.update(dict.fromkeys(sorted(self._log.logged_models() - self._busy.keys())))
        self._close_ended()
        for folder in self._log.unused_folders():
            shutil.rmtree(folder, ignore_errors=True)
            self._log.forget_folder(folder)

    def _go_back(self) -> None:
        """Return models to their states on disk that contain results which Redis has lost, and apply the commands again.

        What such a state contains can't be repeated: it gets an error as its result.
        """
        opened = self._executor.opened
        for model_id, applied in self._log.applied_of(list(opened)).items():
            if opened[model_id] <= applied:
                continue
            logger.error("Redis has lost results of model %s after command %d", model_id, applied)
            owner, contained = self._log.model(model_id).owner, self._executor.go_back(model_id)
            for seq_id in range(applied + 1, contained + 1):
                self._log.commit(model_id, owner, seq_id, Result.of_error(LOST_RESULT, "server"))
            self._applied_before[model_id] = applied
            self._unsaved.setdefault(model_id, time.monotonic())

    def _close_ended(self) -> None:
        """Close the models of ended sessions, once their commands are applied, and delete what is theirs."""
        for session_id, model_ids in self._log.ended().items():
            closed = [model_id for model_id in model_ids if self._log.close(model_id)]
            for model_id in closed:
                self._unsaved.pop(model_id, None)
                self._busy.pop(model_id, None)
            self._executor.discard(closed)
            if len(closed) == len(model_ids):
                self._log.forget_session(session_id)

    def _report_wait(self, reason: str) -> None:
        if time.monotonic() - self._reported_at >= LOG_INTERVAL_S:
            self._reported_at = time.monotonic()
            logger.error("%s: no command is applied until this is over", reason)

    def _save(self, model_id: str) -> None:
        contained = self._executor.save(model_id)
        self._log.truncate(model_id, [each for each in self._log.logged(model_id) if each <= contained])
        del self._unsaved[model_id]
