"""Response bodies of the REST API."""

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from offbeat.services.buffer.api import Counters
from offbeat.services.control.explain import Cause, sentence
from offbeat.services.control.interfaces import Health
from offbeat.services.control.run import (
    DesiredState,
    Restarts,
    RunRecord,
    RunState,
)
from offbeat.services.live_settings import LIVE_SETTINGS, Change, LiveSetting, Settings


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
    """Staleness of the newest step's groups, in versions."""

    mean: float | None
    max: float | None
    bound: float
    """Current `max_staleness`."""


class RatesView(View):
    """Per second, over the last quarter of a minute."""

    steps: float
    trajectories: float
    """Finished trajectories, trained or not."""
    tokens_generated: float
    tokens_trained: float


_view_fields: dict[str, Any] = {
    setting.name: (setting.type, Field(description=f"{setting.info.about} (`{setting.info.path}`)."))
    for setting in LIVE_SETTINGS.values()
}


class SettingsView(create_model("SettingsView", __base__=View, **_view_fields)):
    """Current live settings."""

    @classmethod
    def of(cls, settings: Settings) -> "SettingsView":
        return cls.model_validate(settings, from_attributes=True)

    def to_settings(self) -> Settings:
        """Return the settings with typed fields."""
        return Settings(**self.model_dump())


class _Patch(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _patch_field(setting: LiveSetting) -> Any:
    info = setting.info
    about = f"{info.about} (`{info.path}`): {setting.when}."
    return setting.type | None, Field(None, ge=info.ge, gt=info.gt, le=info.le, description=about)


_patch_fields = {setting.name: _patch_field(setting) for setting in LIVE_SETTINGS.values()}


class SettingsPatch(create_model("SettingsPatch", __base__=_Patch, **_patch_fields)):
    """Settings to change; omitted ones stay as they are."""

    def values(self) -> dict[str, float]:
        """Return the settings to change."""
        return self.model_dump(exclude_none=True)


class ChangeView(View):
    """A requested change of settings."""

    values: dict[str, float]
    at: float
    """Unix time of the request."""
    from_step: int | None
    """First optimizer batch (0-based) with the new value; null until the learner has reached a step boundary. Process
    counts apply at once."""
    why: str = ""
    """Reason of the learner's staleness controller; empty for a manual change."""

    @classmethod
    def of(cls, change: Change) -> "ChangeView":
        return cls(values=change.values, at=change.at, from_step=change.step, why=change.why)


class PathsView(View):
    """Paths on the run's host."""

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
    """The learner's phase: `warm start`, `evaluating`, `training`."""
    error: str
    log: str
    """File in the run's folder with details of `error`."""
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
    """Undecodable trajectories that are kept, at most 16; their groups count as dropped (`corrupt`)."""
    staleness: StalenessView | None = None
    rates: RatesView | None = None
    settings: SettingsView
    changes: list[ChangeView] = Field(default_factory=list[ChangeView])
    """Changes of the settings, in order of request."""
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
    """Runs in this page of the list that can't be shown, in whatever state."""
    next: str | None = None
    """Ask with `after` set to this for older ones; null when these were the last."""


class QuarantinedView(View):
    """A trajectory that could not be read: it never reached the trainer."""

    group: int
    """Number of its group, which was dropped."""
    member: int
    complaint: str
    """Error of decoding."""
    size: int
    """Bytes."""
    head: str
    """First 64 bytes, as hex."""


class QuarantineView(View):
    """Undecodable trajectories, newest first."""

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
    """Components that wait for each other."""

    run: str
    sentence: str
    chain: list[LinkView]
    """From the waiting component to the one that it ultimately waits for."""

    @classmethod
    def of(cls, run_id: str, links: Sequence[Cause]) -> "WhyView":
        chain = [
            LinkView(
                who=link.component,
                state=link.state,
                says=link.text,
                waits_for=link.waits_for,
                since_s=link.since_s,
                detail=dict(link.detail),
            )
            for link in links
        ]
        return cls(run=run_id, sentence=sentence(links), chain=chain)


class DeletedView(View):
    """Result of a deletion."""

    id: str
    files: list[str]
    """Removed folders and files, if requested."""


class HealthView(View):
    """The service lives and reaches its state."""

    status: Literal["ok"] = "ok"


class ProblemView(View):
    """One problem of a configuration."""

    path: str
    message: str
    suggestion: str | None = None
    """The nearest valid key, where the key is unknown."""


class ErrorBody(View):
    """Reason for a refused call."""

    code: str
    message: str
    problems: list[ProblemView] = Field(default_factory=list[ProblemView])


class ErrorView(View):
    """The body of every answer that is not a success."""

    error: ErrorBody


def finite(value: float) -> float | None:
    """Return None for NaN and infinity, which JSON lacks."""
    return value if math.isfinite(value) else None


def places(record: RunRecord) -> PathsView:
    """Return the paths of a run."""
    folder = record.output_dir
    return PathsView(
        output_dir=folder,
        logs=f"{folder}/logs",
        checkpoints=f"{folder}/checkpoints",
        tensorboard=f"{folder}/tensorboard",
    )


def component_views(healths: dict[str, tuple[Health, str]], restarts: dict[str, Restarts]) -> dict[str, ComponentView]:
    """Return the components with their numbers of restarts."""
    return {
        name: ComponentView(health=health, detail=detail, restarts=restarts.get(name, Restarts()).total)
        for name, (health, detail) in healths.items()
    }
