"""Learner status and metrics.

Invariant: non-finite values are counted, not recorded.
"""

import json
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from redis import Redis

from offbeat.services.diagnosis import WINDOW_STEPS, diagnose, encode_findings
from offbeat.services.findings import NO_LIMITS, DiagnosisLimits, RunFinding
from offbeat.services.keys import RunKeys
from offbeat.services.messages.types import Group
from offbeat.services.redis.run_writes import RunWrites
from offbeat.services.telemetry import (
    REWOUND_TO,
    MetricRecord,
    MetricsSink,
    Partial,
    mean,
)
from offbeat.services.text_samples import TextSample
from offbeat.trainer.data.replay_buffer import ReplayedGroups
from offbeat.trainer.learner.episode_success import success_values
from offbeat.trainer.learner.progress_view import LearnerView, SilentView
from offbeat.trainer.learner.step_groups import StepGroups
from offbeat.trainer.watchdog import Watchdog

logger = logging.getLogger(__name__)

FILE = Path("state", "diagnosis.json")


class StatusBoard(Protocol):
    def show(self, **fields: str) -> None: ...


class RedisStatusBoard:
    def __init__(self, redis: Redis, run_id: str, uid: str = "") -> None:
        self._write = RunWrites(redis, run_id, uid)
        self._key = RunKeys(run_id).record

    def hold(self, epoch: int) -> None:
        """Write only until a newer learner holds the run."""
        self._write.epoch = epoch

    def show(self, **fields: str) -> None:
        self._write("HSET", self._key, *(part for field in fields.items() for part in field))


class LearnerReporter:
    def __init__(
        self,
        sink: MetricsSink,
        board: StatusBoard,
        view: LearnerView | None = None,
        watchdog: Watchdog | None = None,
        limits: DiagnosisLimits = NO_LIMITS,
    ) -> None:
        """watchdog: kicked at each activity. limits: of the diagnosis."""
        self._limits = limits
        self._steps: list[Mapping[str, float]] = []
        self._warned: set[str] = set()
        self._watchdog = watchdog
        self._view = view or SilentView()
        self._sink = sink
        self._board = board
        self._phase = ""
        self._problems = {"checkpoint": "", "upload": "", "ledger": ""}
        self._shown: str | None = None

    def set_phase(self, text: str) -> None:
        if text == self._phase:
            return
        self._phase = text
        logger.info("%s", text)
        self._view.show_phase(text)
        self._board.show(learner_phase=text)
        self._sink.append(MetricRecord("learner", {}, labels={"phase": text}))

    def record_rewind(self, step: int) -> None:
        """Record that evaluations after `step` are of weights that are given up."""
        self._sink.append(MetricRecord("learner", {}, labels={REWOUND_TO: str(step)}))

    def set_activity(self, stage: str, *, step: int, **detail: float | str) -> None:
        if self._watchdog is not None:
            self._watchdog.kick()
        self._board.show(learner_doing=json.dumps({"stage": stage, "step": step, "since": time.time(), **detail}))

    def set_problem(self, problem: str, of: Literal["checkpoint", "upload", "ledger"] = "checkpoint") -> None:
        """Set the problem of checkpoints, uploads or the step ledger; empty clears it."""
        is_new = bool(problem) and problem != self._problems[of]
        self._problems[of] = problem
        if is_new:
            logger.error("%s", problem)
            self._view.print(f"{problem[:1].upper()}{problem[1:]}.")
        if is_new and of == "checkpoint":
            self._sink.append(MetricRecord("learner", {"checkpoints_failed": Partial("sum", 1.0)}))
        shown = "; ".join(each for each in self._problems.values() if each)
        if shown != self._shown:
            self._shown = shown
            self._board.show(learner_trouble=shown)

    def record_uploads(self, seconds: Sequence[float], num_failed: int, num_skipped: int) -> None:
        """Record uploads since the last call. seconds: of each complete one."""
        values = {
            "checkpoints_uploaded": Partial("sum", float(len(seconds))),
            "checkpoint_uploads_failed": Partial("sum", float(num_failed)),
            "checkpoint_uploads_skipped": Partial("sum", float(num_skipped)),
            **({"time/upload_s": mean(seconds)} if seconds else {}),
        }
        if seconds or num_failed or num_skipped:
            self._sink.append(MetricRecord("learner", values))

    def record_startup(self, seconds: Mapping[str, float]) -> None:
        values = {f"startup/{name}_s": Partial("last", value) for name, value in seconds.items()}
        logger.info("start-up: %s", ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items()))
        self._sink.append(MetricRecord("learner", values, labels={"phase": "startup"}))

    def record_step(self, step: int, values: Mapping[str, Partial], samples: tuple[TextSample, ...] = ()) -> None:
        finite = {name: partial for name, partial in values.items() if math.isfinite(partial.total)}
        if len(finite) < len(values):
            logger.warning("step %d: not finite: %s", step, ", ".join(sorted(set(values) - set(finite))))
            finite["not_finite"] = Partial("sum", float(len(values) - len(finite)))
        self._view.show_step(step, finite)
        self._view.show_samples(samples)
        self._sink.append(MetricRecord("learner", finite, step=step, samples=samples))
        means = {name: partial.value for name, partial in finite.items()}
        had_gradient = means.get("actor/grad_norm", 0.0) > 0
        trained = {"learner_has_trained": str(int(had_gradient))} if had_gradient or step == 1 else {}
        findings = self._diagnose(means)
        self._board.show(
            learner_step=str(step),
            learner_metrics=json.dumps(means),
            learner_findings=encode_findings(findings),
            **trained,
        )

    def save(self, folder: Path) -> None:
        """Save the steps that the diagnosis reads."""
        (folder / FILE).parent.mkdir(exist_ok=True)
        (folder / FILE).write_text(json.dumps(self._steps))

    def load(self, folder: Path, *, is_own: bool) -> None:
        """Load a checkpoint's steps, unless it is another run's."""
        if is_own and (folder / FILE).is_file():
            self._steps = json.loads((folder / FILE).read_text())

    def _diagnose(self, values: Mapping[str, float]) -> list[RunFinding]:
        """Return current findings; warn of each once."""
        self._steps.append(values)
        if len(self._steps) > WINDOW_STEPS + 1:
            del self._steps[1]  # the first step stays: later ones are compared with it
        findings = diagnose(self._steps, self._limits)
        for finding in findings:
            if finding.is_warning and finding.name not in self._warned:
                self._warned.add(finding.name)
                logger.warning("%s", finding)
                self._view.print(f"Warning: {finding}")
        return findings


class Skips(NamedTuple):
    """What non-finite gradients skipped of a batch's optimizer steps."""

    some: bool
    """At least one."""
    policy: bool
    """All of the policy; of the critic, where that is trained alone."""
    model: bool
    """All of the policy or all of the critic."""


def find_skips(gauges: Mapping[str, Partial]) -> Skips:
    counts = [gauges[name] for name in ("actor/skipped_steps", "critic/skipped_steps") if name in gauges]
    whole = [each.total >= each.count for each in counts]
    return Skips(any(each.total > 0 for each in counts), bool(whole) and whole[0], any(whole))


def is_overflow(gauges: Mapping[str, Partial]) -> bool:
    """Return whether every skipped step may succeed at a lower loss scale."""
    totals = {name: value.total for name, value in gauges.items()}
    return all(
        totals.get(f"{model}/skipped_steps", 0.0) <= totals.get(f"{model}/overflow_steps", 0.0)
        for model in ("actor", "critic")
    )


def step_values(
    taken: StepGroups, step: int, gauges: Mapping[str, Partial], seconds: Mapping[str, float]
) -> dict[str, Partial]:
    """Return a step's metrics. step: 0-based; seconds: per stage."""
    computed = gauges.get("tokens/computed", Partial("sum", 0.0)).total
    busy_s = seconds.get("train", 0.0)
    return {
        "tokens_trained": Partial("sum", 0.0),
        **gauges,
        **({} if taken.are_rows else _of_episodes(taken, step)),
        "trajectories": Partial("sum", float(sum(len(group.trajectories) for group in taken.groups))),
        "groups": Partial("sum", float(len(taken.groups))),
        **{f"groups_dropped/{reason}": Partial("sum", float(n)) for reason, n in taken.dropped.items()},
        **({"tokens_per_busy_s": Partial("mean", computed, busy_s)} if computed and busy_s else {}),
        **{f"time/{name}_s": mean([value]) for name, value in seconds.items()},
    }


def _of_episodes(taken: StepGroups, step: int) -> dict[str, Partial]:
    staleness = [float(step - group.oldest_version) for group in taken.groups]
    return {
        **_consumed(taken.groups),
        "staleness": mean(staleness),
        "staleness_max": Partial("max", max(staleness)),
        "groups_without_signal": Partial("sum", float(len(taken.groups) - len(taken.trained))),
        "groups_trained_stale": Partial("sum", float(taken.num_stale)),
    }


def replay_values(replayed: ReplayedGroups, step: int) -> dict[str, Partial]:
    if not replayed.groups:
        return {}
    staleness = [float(step - group.oldest_version) for group in replayed.groups]
    return {
        "groups_again": Partial("sum", float(len(replayed.groups))),
        "staleness_again": mean(staleness),
        "staleness_again_max": Partial("max", max(staleness)),
    }


def _consumed(groups: Iterable[Group]) -> dict[str, Partial]:
    members = [trajectory for group in groups for trajectory in group.trajectories]
    by_name: dict[str, list[float]] = {}
    for trajectory in members:
        for name, value in trajectory.metrics.items():
            if math.isfinite(value):
                by_name.setdefault(f"env/{trajectory.tag}/{name}", []).append(value)
    return {
        **{name: mean(values) for name, values in by_name.items()},
        **success_values(members),
        "reward": mean(t.reward for t in members),
        "reward_min": Partial("min", min(t.reward for t in members)),
        "reward_max": Partial("max", max(t.reward for t in members)),
        "episodes_truncated": mean(float(t.is_truncated) for t in members),
        "episodes_without_tokens": mean(float(t.num_sampled == 0) for t in members),
        "turns": mean(float(len(t.turns)) for t in members),
    }
