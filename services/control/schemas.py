import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from offbeat.envs.config import DocumentedModel
from offbeat.services.buffer.api import Counters
from offbeat.services.control.causes import Cause
from offbeat.services.control.explain import sentence
from offbeat.services.control.interfaces import Health
from offbeat.services.control.run import (
    DesiredState,
    Restarts,
    RunRecord,
    RunState,
)
from offbeat.services.findings import RunFinding
from offbeat.services.live_settings import LIVE_SETTINGS, Change, LiveSetting, Settings


class View(DocumentedModel):
    """Base of response bodies."""

    model_config = ConfigDict(frozen=True)


class ComponentView(View):
    """Last observed state of a component."""

    health: Health
    detail: str
    restarts: int
    """Restarts after a death."""


class CountersView(View):
    """Group counters: admitted = trained + dropped + failed + in flight."""

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
    """Rates per second over the last 15 s; the learner's over at least its last step."""

    steps: float
    trajectories: float
    """Trained or not."""
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
        return Settings(**self.model_dump())


class _Patch(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _patch_field(setting: LiveSetting) -> Any:
    info = setting.info
    about = f"{info.about} (`{info.path}`): {setting.when}."
    return setting.type | None, Field(None, ge=info.ge, le=info.le, description=about)


_patch_fields = {setting.name: _patch_field(setting) for setting in LIVE_SETTINGS.values()}


class SettingsPatch(create_model("SettingsPatch", __base__=_Patch, **_patch_fields)):
    """Settings to change; omitted ones are unchanged."""

    def values(self) -> dict[str, float]:
        return self.model_dump(exclude_none=True)


class ChangeView(View):
    """Requested change of settings."""

    values: dict[str, float]
    at: float
    """Unix time."""
    from_step: int | None
    """First optimizer batch (0-based) with the change; null until the next step boundary. Process counts change at
    once.
    """
    why: str = ""
    """Reason of the staleness controller; empty for a manual change."""

    @classmethod
    def of(cls, change: Change) -> "ChangeView":
        return cls(values=change.values, at=change.at, from_step=change.step, why=change.why)


class PathsView(View):
    """Paths on the run's host."""

    output_dir: str
    logs: str
    checkpoints: str
    tensorboard: str


class FindingView(View):
    """Finding of a run's diagnosis."""

    name: str
    """`no_signal`, `truncated`, ..."""
    seen: str
    """What was seen, with numbers."""
    cause: str
    """Likely cause and remedy."""
    keys: tuple[str, ...]
    """Configuration keys to change, most likely first."""
    is_warning: bool
    """False for hints about speed."""

    @classmethod
    def of(cls, finding: RunFinding) -> "FindingView":
        return cls.model_validate(asdict(finding))

    def finding(self) -> RunFinding:
        return RunFinding(self.name, self.seen, self.cause, self.keys, self.is_warning)


class RunView(View):
    """State of a run."""

    id: str
    state: RunState
    wanted: DesiredState
    phase: str
    """The learner's phase: `warm start`, `evaluating`, `training`; before, the model that is downloaded."""
    error: str
    """Why it failed, or why it trained nothing."""
    log: str
    """File with details of `error`, in the run's folder."""
    resumable: bool
    """False if a resume would fail again: configuration, model, envs."""
    step: int
    """Optimizer batches published; -1: none."""
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
    """Undecodable trajectories kept (at most 16), of groups dropped as `corrupt`."""
    staleness: StalenessView | None = None
    rates: RatesView | None = None
    settings: SettingsView
    changes: list[ChangeView] = Field(default_factory=list[ChangeView])
    """Newest changes of settings, 100 to 119 of more, oldest first."""
    metrics: dict[str, float | None] = Field(default_factory=dict[str, float | None])
    """The learner's newest metrics."""
    diagnosis: list[FindingView] = Field(default_factory=list[FindingView])
    """Findings about the newest steps, gravest first."""
    paths: PathsView


class UnreadableView(View):
    """Run that can't be read, as it was recorded by another version; `DELETE` removes it from a mesh."""

    id: str
    reason: str


class RunsView(View):
    """Page of runs."""

    runs: list[RunView]
    unreadable: list[UnreadableView] = Field(default_factory=list[UnreadableView])
    """Unreadable runs, of any state."""
    next: str | None = None
    """`after` of the next page; null on the last."""


class QuarantinedView(View):
    """Undecodable trajectory; not trained on."""

    group: int
    """Number of its dropped group."""
    member: int
    complaint: str
    """Decoding error."""
    size: int
    """Bytes."""
    head: str
    """First 64 bytes, hex."""


class QuarantineView(View):
    """Undecodable trajectories, newest first."""

    trajectories: list[QuarantinedView]


class LinkView(View):
    """Component and what it waits for."""

    who: str
    state: str
    says: str
    waits_for: str | None
    since_s: float | None
    detail: dict[str, Any]


class WhyView(View):
    """Chain of components that wait for each other."""

    run: str
    sentence: str
    chain: list[LinkView]
    """Waiting component first."""

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
    """Removed folders and files."""
    left: list[str] = Field(default_factory=list[str])
    """Files of others in the run's folder, and a Redis' state."""


class HealthView(View):
    """Healthy service."""

    status: Literal["ok"] = "ok"


class ProblemView(View):
    """Problem of a configuration."""

    path: str
    message: str
    suggestion: str | None = None
    """Nearest valid key for an unknown one."""


class ErrorBody(View):
    """Details of an error."""

    code: str
    message: str
    problems: list[ProblemView] = Field(default_factory=list[ProblemView])


class ErrorView(View):
    """Body of an error response."""

    error: ErrorBody


def finite(value: float) -> float | None:
    """Replace NaN and infinity by None."""
    return value if math.isfinite(value) else None


def paths_view(record: RunRecord) -> PathsView:
    folder = record.output_dir
    return PathsView(
        output_dir=folder,
        logs=f"{folder}/logs",
        checkpoints=f"{folder}/checkpoints",
        tensorboard=f"{folder}/tensorboard",
    )


def component_views(healths: dict[str, tuple[Health, str]], restarts: dict[str, Restarts]) -> dict[str, ComponentView]:
    return {
        name: ComponentView(health=health, detail=detail, restarts=restarts.get(name, Restarts()).total)
        for name, (health, detail) in healths.items()
    }
