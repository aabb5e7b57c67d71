"""Scorer of one role's complete groups, with the learner's model, packing, dtype and attention.

Invariant: every group of the stream gets a score, a refusal with a reason, or a mark that it needs none; a successor
continues after any exit.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import cast

import torch
from redis import Redis
from redis import exceptions as redis_errors

from offbeat.services.buffer.scores import ClaimedGroup, RedisScoreQueue
from offbeat.services.errors import RetryableError
from offbeat.services.messages.types import Group
from offbeat.services.telemetry import MetricRecord, MetricsSink, Partial
from offbeat.trainer.config.scored_roles import ScoredRole
from offbeat.trainer.data.reward_shaping import shape_rewards
from offbeat.trainer.data.selection import carries_signal
from offbeat.trainer.data.step_batch import drop_temperature
from offbeat.trainer.engines.prompt_model import OpenPromptEngine
from offbeat.trainer.run import LearnerRun
from offbeat.trainer.training.frozen_roles import load_scorer
from offbeat.trainer.training.prepare_scores import RowScorer
from offbeat.trainer.training.score_keys import describe_start, start_key

logger = logging.getLogger(__name__)

IDLE_POLL_S = 0.5
"""Longest wait for a group, or for a dead scorer's claim to end."""
RETRY_S = 0.5
RENEWALS_PER_LEASE = 4


class Scorer:
    def __init__(
        self,
        run: LearnerRun,
        role: ScoredRole,
        redis: Redis,
        queue: RedisScoreQueue,
        metrics: MetricsSink,
        open_engine: OpenPromptEngine | None = None,
    ) -> None:
        """open_engine: for teachers by vLLM."""
        self._run = run
        self._open_engine = open_engine
        self._role = role
        self._redis = redis
        self._queue = queue
        self._metrics = metrics
        self._lease_s = run.config.buffer.worker_timeout_s
        self._stop = threading.Event()
        self.status = "waits for the policy's first weights"
        """For `offbeat runs why`; empty once it scores."""

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> None:
        """Score until stopped.

        Raises:
            ForeignRunError: the run was deleted or created anew.
            ControlError: the model can't be loaded.
        """
        torch.set_num_threads(self._run.config.actor_train.num_threads)
        if not self._wait_for_start():
            return
        self.status = "loads its model"
        scorer = load_scorer(self._run, self._role, self._run.model_folder, self._open_engine)
        self.status = ""
        logger.info("%s scores groups", self._role.name)
        while not self._stop.is_set():
            try:
                self._score_next(scorer)
            except (RetryableError, redis_errors.ConnectionError, redis_errors.TimeoutError) as error:
                logger.warning("%s; retrying", error)
                self._stop.wait(RETRY_S)

    def _wait_for_start(self) -> bool:
        """Wait for the learner's warm start, if needed; return False if stopped."""
        if not self._role.starts_from_policy or self._run.config.warm_start is None:
            return True
        while not self._stop.is_set():
            if self._has_start():
                return True
            self._stop.wait(IDLE_POLL_S)
        return False

    def _has_start(self) -> bool:
        """Return whether the first weights are complete, and in the folder if they were when the learner announced them."""
        announced = cast(bytes | None, self._redis.get(start_key(self._run.run_id)))
        return announced == describe_start(self._run).encode()

    def _score_next(self, scorer: RowScorer) -> None:
        claim = self._queue.claim()
        if claim.claimed is None:
            self._queue.wait_for_group(IDLE_POLL_S)
            return
        with self._renewed(claim.claimed.number):
            self._score(scorer, claim.claimed, claim.num_missing)

    def _score(self, scorer: RowScorer, claimed: ClaimedGroup, num_missing: int) -> None:
        group = claimed.group
        if group is None:
            self._queue.refuse(claimed.number, claimed.problem)
            return
        if not self._is_needed(group):
            self._queue.skip(claimed.number)
            return
        began, config = time.monotonic(), self._run.config
        try:
            (scores,) = scorer.encode([drop_temperature(group, config.temperature)])
        except ValueError as error:  # a malformed group, which the learner drops, too
            self._queue.refuse(claimed.number, str(error))
            return
        if not scores.is_finite:
            logger.error("group %d: %s gives scores that are not finite", claimed.number, self._role.name)
        stored = self._queue.submit(claimed.number, scores.blob)
        self._report(group, time.monotonic() - began, num_missing, stored=stored)

    def _is_needed(self, group: Group) -> bool:
        """Return whether the learner trains on the group with this score, unless user code decides."""
        if not self._role.scores(group.tag):
            return False
        if self._run.config.reads_data:
            return all(trajectory.num_sampled for trajectory in group.trajectories)
        (shaped,) = shape_rewards([group], self._run.config)
        return self._run.config.group_filter_cls is not None or carries_signal(group, self._run.config, shaped)

    def _report(self, group: Group, seconds: float, num_missing: int, *, stored: bool) -> None:
        tokens = sum(trajectory.num_tokens for trajectory in group.trajectories)
        name = self._role.name
        values = {
            f"{name}/groups": Partial("sum", float(stored)),
            f"{name}/tokens": Partial("sum", float(tokens)),
            f"{name}/tokens_per_busy_s": Partial("mean", float(tokens), max(seconds, 1e-9)),
            f"{name}/queue_depth": Partial("max", float(num_missing)),
        }
        self._metrics.append(MetricRecord("scoring", values))

    @contextlib.contextmanager
    def _renewed(self, number: int) -> Iterator[None]:
        """Renew the claim while a group is scored."""
        done = threading.Event()

        def renew() -> None:
            while not done.wait(self._lease_s / RENEWALS_PER_LEASE):
                try:
                    self._queue.renew(number)
                except RetryableError as error:
                    logger.warning("the claim of group %d can't be renewed: %s", number, error)

        thread = threading.Thread(target=renew, name="claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
