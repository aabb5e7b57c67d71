"""What the control service tells of a run: the bodies of REST answers."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from offbeat.services.buffer.api import Counters
from offbeat.services.control.explain import Cause, sentence
from offbeat.services.control.interfaces import Health
from offbeat.services.control.run import (
    DesiredState,
    Restarts,
    RunRecord,
    RunState,
)
from offbeat.services.live_settings import Change, Settings


class View(BaseModel):
    """Part of an answer."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class ComponentView(View):
    """One part of a run as the reconciler last saw it."""

    health: Health
    detail: str
    restarts: int
    """Times that it died and was started again."""


class CountersView(View):
    """The buffer's ledger: admitted = trained + dropped + failed + in flight."""

    admitted: int
    submitted: int
    trained: int
    dropped: dict[str, int]
    failed: dict[str, int]
    in_flight: int

    @classmethod
    def of(cls, counters: Counters) -> "CountersView":
        return cls(
            admitted=counters.admitted,
            submitted=counters.submitted,
            trained=counters.trained,
            dropped=counters.dropped,
            failed=counters.failed,
            in_flight=counters.in_flight,
        )


class StalenessView(View):
    """How many versions the groups of the newest step lagged behind."""

    mean: float | None
    max: float | None
    bound: float
    """`max_staleness` as it holds now."""


class RatesView(View):
    """Per second, over the last quarter of a minute."""

    steps: float
    trajectories: float
    """Played, whether they are trained on or not."""
    tokens_generated: float
    tokens_trained: float


class SettingsView(View):
    """What may be changed while the run goes on, as it holds now."""

    num_workers: int
    """Env worker processes (`rollout.num_workers`)."""
    num_replicas: int
    """vLLM engines (`actor_infer.num_replicas`)."""
    learning_rate: float
    """Peak of the schedule (`actor_train.training_args.learning_rate`)."""
    temperature: float
    """Of groups that start now (`actor_infer.generating_args.temperature`)."""
    max_staleness: float
    num_env_groups: int
    """Groups in play at most (`train_env_manager.num_env_groups`)."""

    @classmethod
    def of(cls, settings: Settings) -> "SettingsView":
        return cls.model_validate(settings, from_attributes=True)


class SettingsPatch(BaseModel):
    """Settings to change; what is left out stays."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)

    num_workers: int | None = Field(default=None, ge=1, le=4096)
    """Env worker processes (`rollout.num_workers`): at once."""
    num_replicas: int | None = Field(default=None, ge=1, le=4096)
    """vLLM engines (`actor_infer.num_replicas`): at once; replicas that run are left alone."""
    learning_rate: float | None = Field(default=None, ge=0)
    """Peak of the learner's schedule (`actor_train.training_args.learning_rate`): from the next step on."""
    temperature: float | None = Field(default=None, gt=0)
    """Of groups that start after the next step boundary (`actor_infer.generating_args.temperature`)."""
    max_staleness: float | None = Field(default=None, ge=0)
    """Versions that a consumed group may lag behind: from the next step on, at admission and at consumption."""
    num_env_groups: int | None = Field(default=None, ge=1, le=1_000_000)
    """Groups in play at most (`train_env_manager.num_env_groups`): from the next step on."""

    def values(self) -> dict[str, float]:
        """What is to change."""
        return self.model_dump(exclude_none=True)


class ChangeView(View):
    """A change of settings that somebody asked for."""

    values: dict[str, float]
    at: float
    """Unix time at which it was asked for."""
    from_step: int | None
    """The optimizer batch (0-based) from which on it holds; null until the learner has come to a step boundary.
    Numbers of workers and replicas hold at once."""
    why: str = ""
    """Of the learner's staleness controller, where it has asked; empty for a person's."""

    @classmethod
    def of(cls, change: Change) -> "ChangeView":
        return cls(values=change.values, at=change.at, from_step=change.step, why=change.why)


class PathsView(View):
    """Where things lie on the host that runs it."""

    output_dir: str
    logs: str
    checkpoints: str
    tensorboard: str


class RunView(View):
    """One run."""

    id: str
    state: RunState
    wanted: DesiredState
    phase: str
    """What the learner is at, in a word: `warm start`, `evaluating`, `training`."""
    error: str
    log: str
    """File in the run's folder that tells more about `error`."""
    step: int
    """Optimizer batches published; -1 before version 0."""
    version: int
    max_steps: int
    attempt: int
    created_at: float
    started_at: float
    running_at: float
    ended_at: float
    components: dict[str, ComponentView] = Field(default_factory=dict[str, ComponentView])
    counters: CountersView | None = None
    quarantined: int = 0
    """Trajectories that could not be read and are kept aside, at most 16; their groups count as dropped (`corrupt`)."""
    staleness: StalenessView | None = None
    rates: RatesView | None = None
    settings: SettingsView
    changes: list[ChangeView] = Field(default_factory=list[ChangeView])
    """Of the settings, in the order in which they were asked for."""
    metrics: dict[str, float | None] = Field(default_factory=dict[str, float | None])
    """The learner's newest record."""
    places: PathsView


class UnreadableView(View):
    """A run whose record another version of Offbeat has written; `DELETE` forgets it."""

    id: str
    reason: str


class RunsView(View):
    """Several runs."""

    runs: list[RunView]
    unreadable: list[UnreadableView] = Field(default_factory=list[UnreadableView])
    """Runs in the same stretch of the list that can't be told, whatever their state."""
    next: str | None = None
    """Ask with `after` set to this for older ones; null when these were the last."""


class QuarantinedView(View):
    """A trajectory that could not be read: it never reached the trainer."""

    group: int
    """Number of its group, which was dropped."""
    member: int
    complaint: str
    """What is wrong with it."""
    size: int
    """Bytes."""
    head: str
    """Its first 64 bytes, as hex."""


class QuarantineView(View):
    """What is kept aside, newest first."""

    trajectories: list[QuarantinedView]


class LinkView(View):
    """One part of a run, and what it waits for."""

    who: str
    state: str
    says: str
    waits_for: str | None
    since_s: float | None
    detail: dict[str, Any]


class WhyView(View):
    """Who waits for whom."""

    run: str
    sentence: str
    chain: list[LinkView]
    """From the one who waits most to the one who keeps all waiting."""

    @classmethod
    def of(cls, run_id: str, links: Sequence[Cause]) -> "WhyView":
        chain = [LinkView.model_validate(link, from_attributes=True) for link in links]
        return cls(run=run_id, sentence=sentence(links), chain=chain)


class DeletedView(View):
    """What a deletion has removed."""

    id: str
    files: list[str]
    """Folders and files that are gone, where it was asked for."""


class HealthView(View):
    """The service lives and reaches its state."""

    status: Literal["ok"] = "ok"


class ProblemView(View):
    """One thing that is wrong with a configuration."""

    path: str
    message: str
    suggestion: str | None = None
    """The nearest valid key, where the key is unknown."""


class ErrorBody(View):
    """Why a call was refused."""

    code: str
    message: str
    problems: list[ProblemView] = Field(default_factory=list[ProblemView])


class ErrorView(View):
    """The body of every answer that is not a success."""

    error: ErrorBody


def finite(value: float) -> float | None:
    """JSON knows no NaN and no infinity."""
    return value if math.isfinite(value) else None


def places(record: RunRecord) -> PathsView:
    """Where a run's things lie."""
    folder = record.output_dir
    return PathsView(
        output_dir=folder,
        logs=f"{folder}/logs",
        checkpoints=f"{folder}/checkpoints",
        tensorboard=f"{folder}/tensorboard",
    )


def component_views(healths: dict[str, tuple[Health, str]], restarts: dict[str, Restarts]) -> dict[str, ComponentView]:
    """Components with how often they were restarted."""
    return {
        name: ComponentView(health=health, detail=detail, restarts=restarts.get(name, Restarts()).total)
        for name, (health, detail) in healths.items()
    }
