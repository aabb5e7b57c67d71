"""Evaluations on held-out tasks.

Invariant: each is recorded once, even if the learner is replaced.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

from redis import Redis

from offbeat.services.buffer.api import LearnerBuffer
from offbeat.services.durable_files import FULL_DISK
from offbeat.services.keys import RunKeys
from offbeat.services.messages.codec import encode_trajectories
from offbeat.services.messages.types import Trajectory
from offbeat.services.redis.run_writes import RunWrites
from offbeat.services.telemetry import MetricRecord, MetricsSink, Partial
from offbeat.trainer.learner.evaluation_metrics import drop_unanswered, evaluation_values
from offbeat.trainer.training.fenced_folder import FencedFolder

logger = logging.getLogger(__name__)

When = Literal["before", "during", "after"]
Sampling = Literal["sampled", "greedy", "loss"]
"""`loss`: of a validation file."""

MAX_SAVED_EPISODES = 32
"""Per evaluation."""
TOKENS = ".trajectories"
"""Suffix of `encode_trajectories` files."""
POLL_S = 0.5
RETRY_INTERVAL_S = 30.0
"""Of a full disk."""
RECORDED = "recorded"


@dataclass(frozen=True, slots=True)
class Evaluation:
    when: When
    sampling: Sampling
    step: int
    num_episodes: int

    @property
    def eval_id(self) -> str:
        return f"{self.when}-{self.sampling}-{self.step}"

    @classmethod
    def parse(cls, eval_id: str, num_episodes: int) -> "Evaluation":
        when, sampling, step = eval_id.split("-")
        return cls(cast(When, when), cast(Sampling, sampling), int(step), num_episodes)


class EvaluationLog(Protocol):
    """Durable evaluation states: number of episodes, or `recorded`."""

    def load(self) -> Mapping[str, str]: ...

    def put(self, eval_id: str, state: str) -> None: ...

    def remove(self, eval_id: str) -> None: ...


class RedisEvaluationLog:
    def __init__(self, redis: Redis, run_id: str, uid: str = "") -> None:
        self._redis = redis
        self._write = RunWrites(redis, run_id, uid)
        self._key = RunKeys(run_id).key("evaluations")

    def load(self) -> Mapping[str, str]:
        raw = cast(dict[bytes, bytes], self._redis.hgetall(self._key))
        return {key.decode(): value.decode() for key, value in raw.items()}

    def put(self, eval_id: str, state: str) -> None:
        self._write("HSET", self._key, eval_id, state)

    def remove(self, eval_id: str) -> None:
        self._write("HDEL", self._key, eval_id)
        self._write.forget_name(_record_name(eval_id))


def _record_name(eval_id: str) -> str:
    return f"evaluation:{eval_id}"


class Evaluations:
    def __init__(
        self,
        buffer: LearnerBuffer,
        sink: MetricsSink,
        log: EvaluationLog,
        folder: Path,
        score: Callable[[int, float], None] = lambda _step, _value: None,
        *,
        epoch: int = 0,
        group_size: int = 1,
        drops_long: bool = False,
        scores_losses: bool = True,
    ) -> None:
        """score: receives sampled success (missing: failure), or reward if envs report none, or losses, negated. epoch:
        the learner's lease. group_size: `val_env_manager.group_size`. drops_long: exclude unanswerable prompts from
        means. scores_losses: False for a run that is also evaluated by sampling, as these scores can't be compared.
        """
        self._scores_losses = scores_losses
        self._drops_long = drops_long
        self._group_size = group_size
        self._epoch = epoch
        self._files: FencedFolder | None = None
        self._score = score
        self._buffer = buffer
        self._sink = sink
        self._log = log
        self._folder = folder
        self._retry_at = 0.0
        """Monotonic time before which a full disk is not tried again."""
        known = log.load()
        self._recorded = {eval_id for eval_id, state in known.items() if state == RECORDED}
        unrecorded = {eval_id: int(state) for eval_id, state in known.items() if state != RECORDED}
        self._pending = {eval_id: Evaluation.parse(eval_id, count) for eval_id, count in unrecorded.items()}

    def restart(self) -> None:
        """Queue pending evaluations that the buffer has lost; log all; free recorded ones, as after a kill."""
        for eval_id in self._recorded:
            self._log.put(eval_id, RECORDED)
            self._buffer.forget_eval(eval_id)
        for evaluation in list(self._pending.values()):
            self.start(evaluation)

    def start(self, evaluation: Evaluation) -> None:
        if evaluation.eval_id in self._recorded or not evaluation.num_episodes:
            return
        self._log.put(evaluation.eval_id, str(evaluation.num_episodes))
        self._buffer.start_eval(
            evaluation.eval_id,
            evaluation.num_episodes,
            sampling_name=evaluation.sampling,
            min_version=evaluation.step,
        )
        self._pending[evaluation.eval_id] = evaluation

    def is_recorded(self, evaluation: Evaluation) -> bool:
        return evaluation.eval_id in self._recorded

    def record_losses(self, evaluation: Evaluation, losses: Mapping[str, Partial]) -> None:
        """Record an evaluation of a data pipeline."""
        values = {name: value for name, value in losses.items() if not name.startswith("actor/")}
        values["rows"] = Partial("sum", float(evaluation.num_episodes))
        labels = {"when": evaluation.when, "sampling": evaluation.sampling}
        record = MetricRecord("eval", values, step=evaluation.step, labels=labels)
        self._sink.append(record, once=_record_name(evaluation.eval_id))
        loss = values["loss"].value
        logger.info("evaluation %s of %d rows: loss %.4f", evaluation.eval_id, evaluation.num_episodes, loss)
        if self._scores_losses:
            self._score(evaluation.step, -loss)
        self._log.put(evaluation.eval_id, RECORDED)
        self._recorded.add(evaluation.eval_id)

    def discard_after(self, step: int) -> None:
        for eval_id in (*self._recorded, *self._pending):
            if Evaluation.parse(eval_id, 0).step <= step:
                continue
            self._log.remove(eval_id)
            self._recorded.discard(eval_id)
            self._pending.pop(eval_id, None)
            self._buffer.forget_eval(eval_id)

    def collect(self) -> None:
        """Record what is complete; a full disk is tried again after `RETRY_INTERVAL_S`."""
        if time.monotonic() < self._retry_at:
            return
        for evaluation in list(self._pending.values()):
            trajectories = self._buffer.eval_result(evaluation.eval_id)
            if trajectories is not None and not self._record(evaluation, trajectories):
                return

    def wait(self, should_stop: Callable[[], bool]) -> bool:
        """Record all pending evaluations; return False if stopped."""
        while self._pending:
            if should_stop():
                return False
            if time.monotonic() < self._retry_at:
                time.sleep(POLL_S)
                continue
            evaluation = next(iter(self._pending.values()))
            trajectories = self._buffer.wait_eval(evaluation.eval_id, POLL_S)
            if trajectories is not None:
                self._record(evaluation, trajectories)
        return True

    def _record(self, evaluation: Evaluation, trajectories: list[Trajectory]) -> bool:
        """Return False if the disk is full. All but the record may be repeated, by a successor too, so it comes late."""
        try:
            self._save(evaluation, trajectories[:MAX_SAVED_EPISODES])
        except OSError as error:
            if error.errno not in FULL_DISK:
                raise
            logger.warning("evaluation %s waits for room in %s: %s", evaluation.eval_id, self._folder, error)
            self._retry_at = time.monotonic() + RETRY_INTERVAL_S
            return False
        labels = {"when": evaluation.when, "sampling": evaluation.sampling}
        size = self._group_size_of(evaluation)
        answered = drop_unanswered(trajectories, size) if self._drops_long else trajectories
        num_long = len(trajectories) - len(answered)
        values = evaluation_values(answered, evaluation.num_episodes - num_long, step=evaluation.step, group_size=size)
        if num_long:
            values["prompts_too_long"] = Partial("sum", float(num_long))
        if evaluation.sampling == "sampled" and "reward" in values:
            self._score(evaluation.step, values.get("success", values["reward"]).value)
        record = MetricRecord("eval", values, step=evaluation.step, labels=labels)
        self._sink.append(record, once=_record_name(evaluation.eval_id))
        shown = ", ".join(f"{name} {part.value:.3f}" for name, part in values.items() if not name.startswith("env/"))
        logger.info("evaluation %s of %d episodes: %s", evaluation.eval_id, len(trajectories), shown)
        self._log.put(evaluation.eval_id, RECORDED)
        self._recorded.add(evaluation.eval_id)
        self._buffer.forget_eval(evaluation.eval_id)
        del self._pending[evaluation.eval_id]
        return True

    def _group_size_of(self, evaluation: Evaluation) -> int:
        """Return 1 for greedy evaluations, whose siblings are equal."""
        return self._group_size if evaluation.sampling == "sampled" else 1

    def _save(self, evaluation: Evaluation, trajectories: list[Trajectory]) -> None:
        rows = [
            {"tag": t.tag, "seed": t.seed, "reward": t.reward, "metrics": t.metrics, "text": list(t.text)}
            for t in trajectories
        ]
        self._files = self._files or FencedFolder(self._folder, self._epoch)
        self._files.write(f"{evaluation.eval_id}.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
        self._files.write(f"{evaluation.eval_id}{TOKENS}", encode_trajectories(trajectories))
