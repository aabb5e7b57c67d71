"""Settings that may change during a run; source of REST bodies and CLI help.

Invariants: changes are only appended; an adopted one keeps its step, so a repeated step trains with its original
settings.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Annotated, Literal, get_args, get_type_hints

from offbeat.services.errors import CodecError

MIN_TEMPERATURE = 0.01
"""Lowest of training: vLLM samples at it for lower ones, and the trainer divides its logits by the one that is set."""


@dataclass(frozen=True, slots=True)
class SettingInfo:
    path: str
    applied_by: Literal["reconciler", "learner"]
    """The reconciler applies changes at once, the learner at the next step."""
    about: str
    """Without a period."""
    ge: float | None = None
    le: float | None = None
    aliases: tuple[str, ...] = ()
    """Other names, for suggestions."""


@dataclass(frozen=True, slots=True)
class Settings:
    num_workers: Annotated[
        int,
        SettingInfo(
            "rollout.num_workers", "reconciler", "Env worker processes", ge=1, le=4096, aliases=("env_workers",)
        ),
    ]
    num_replicas: Annotated[
        int,
        SettingInfo(
            "actor_infer.num_replicas",
            "reconciler",
            "vLLM engines; running ones are left alone",
            ge=1,
            le=4096,
            aliases=("replicas",),
        ),
    ]
    learning_rate: Annotated[
        float,
        SettingInfo("actor_train.training_args.learning_rate", "learner", "Peak of the learner's schedule", ge=0),
    ]
    temperature: Annotated[
        float,
        SettingInfo(
            "actor_infer.generating_args.temperature",
            "learner",
            "Sampling temperature of new groups",
            ge=MIN_TEMPERATURE,
        ),
    ]
    max_staleness: Annotated[
        float,
        SettingInfo(
            "max_staleness",
            "learner",
            "Policy versions that a group may lag behind, at admission and at consumption",
            ge=0,
        ),
    ]
    num_env_groups: Annotated[
        int,
        SettingInfo(
            "train_env_manager.num_env_groups", "learner", "Maximum number of active groups", ge=1, le=1_000_000
        ),
    ]

    def changed(self, values: Mapping[str, float]) -> "Settings":
        return replace(self, **{name: LIVE_SETTINGS[name].type(value) for name, value in values.items()})


@dataclass(frozen=True, slots=True)
class LiveSetting:
    """Row of `LIVE_SETTINGS`."""

    name: str
    type: type[int] | type[float]
    info: SettingInfo

    @property
    def when(self) -> str:
        """Return when a change takes effect, as a clause."""
        return "at once" if self.info.applied_by == "reconciler" else "from the next step on"


def _table() -> dict[str, LiveSetting]:
    hints = get_type_hints(Settings, include_extras=True)
    return {name: LiveSetting(name, *get_args(hint)) for name, hint in hints.items()}


LIVE_SETTINGS = _table()
AT_ONCE = frozenset(name for name, setting in LIVE_SETTINGS.items() if setting.info.applied_by == "reconciler")


@dataclass(frozen=True, slots=True)
class Change:
    values: dict[str, float] = field(default_factory=dict[str, float])
    at: float = 0.0
    """Unix time, s."""
    step: int | None = None
    """First optimizer batch (0-based); None until adopted."""
    why: str = ""
    """Reason of the learner's controller."""


def configured_settings(config: object) -> Settings:
    return Settings(**{name: attrgetter(setting.info.path)(config) for name, setting in LIVE_SETTINGS.items()})


def encode_settings(settings: Settings) -> str:
    return json.dumps(asdict(settings))


def decode_settings(text: str | bytes) -> Settings:
    """Decode `encode_settings`. Raises `CodecError`."""
    try:
        return Settings(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise CodecError(f"malformed settings: {error}") from error


def encode_change(values: Mapping[str, float], at: float, why: str = "") -> str:
    """Encode as JSON, also read by adopt.lua."""
    return json.dumps({"values": dict(values), "at": at, "why": why})


def decode_change(blob: str | bytes, step: int | None) -> Change:
    """Decode `encode_change`, adopted at `step`; raises `CodecError`."""
    try:
        tree = json.loads(blob)
        values = {str(name): value for name, value in tree["values"].items()}
        return Change(values, float(tree["at"]), step, str(tree.get("why", "")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CodecError(f"malformed change: {error}") from error


def settings_at(base: Settings, changes: Iterable[Change], step: int) -> Settings:
    return base.changed(merge(change for change in changes if change.step is not None and change.step <= step))


def requested_settings(base: Settings, changes: Iterable[Change]) -> Settings:
    """Return the settings once all changes are adopted."""
    return base.changed(merge(changes))


def settings_now(base: Settings, changes: Iterable[Change]) -> Settings:
    """Return the current settings; the learner's once adopted."""
    return base.changed(merge(_in_force(change) for change in changes))


def merge(changes: Iterable[Change]) -> dict[str, float]:
    """Return each changed setting's newest value."""
    merged: dict[str, float] = {}
    for change in changes:
        merged |= change.values
    return merged


def _in_force(change: Change) -> Change:
    if change.step is not None:
        return change
    return replace(change, values={name: value for name, value in change.values.items() if name in AT_ONCE})
