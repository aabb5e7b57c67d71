"""Live settings of a run: settings that may change while it is running, and the step from which each change holds.

Invariants: changes are only appended; one that a learner has adopted keeps its step, so a learner that repeats steps
after a crash, or resumes a run, trains each step with its original settings.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace

from offbeat.services.errors import CodecError

COUNTS = ("num_workers", "num_replicas")
"""Settings that the reconciler applies at once; the learner adopts the others at a step boundary."""
WHOLE = (*COUNTS, "num_env_groups")
"""Whole numbers."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that may change."""

    num_workers: int
    """Env worker processes; `rollout.num_workers` in the configuration."""
    num_replicas: int
    """vLLM engines; `actor_infer.num_replicas`."""
    learning_rate: float
    """Peak of the learner's schedule; `actor_train.training_args.learning_rate`."""
    temperature: float
    """Temperature of groups that start from then on; `actor_infer.generating_args.temperature`."""
    max_staleness: float
    """`max_staleness`."""
    num_env_groups: int
    """Maximum number of active groups; `train_env_manager.num_env_groups`."""

    def changed(self, values: Mapping[str, float]) -> "Settings":
        """These settings with `values` in their place."""
        return replace(self, **{name: int(value) if name in WHOLE else value for name, value in values.items()})


@dataclass(frozen=True, slots=True)
class Change:
    """A requested change."""

    values: dict[str, float] = field(default_factory=dict[str, float])
    at: float = 0.0
    """Unix time of the request, s."""
    step: int | None = None
    """First optimizer batch (0-based) with the change; None until a learner has adopted it."""
    why: str = ""
    """Reason, if the learner's controller requested it."""


def encode_settings(settings: Settings) -> str:
    """Encode as JSON."""
    return json.dumps(asdict(settings))


def decode_settings(text: str | bytes) -> Settings:
    """Undo `encode_settings`. Raises `CodecError`."""
    try:
        return Settings(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise CodecError(f"malformed settings: {error}") from error


def encode_change(values: Mapping[str, float], at: float, why: str = "") -> str:
    """Encode as JSON for the list of changes, which adopt.lua reads, too."""
    return json.dumps({"values": dict(values), "at": at, "why": why})


def decode_change(blob: str | bytes, step: int | None) -> Change:
    """Decode what `encode_change` wrote. step: from which it holds, if a learner has adopted it. Raises `CodecError`."""
    try:
        tree = json.loads(blob)
        values = {str(name): value for name, value in tree["values"].items()}
        return Change(values, float(tree["at"]), step, str(tree.get("why", "")))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CodecError(f"malformed change: {error}") from error


def settings_at(base: Settings, changes: Iterable[Change], step: int) -> Settings:
    """Return the settings of optimizer batch `step` (0-based)."""
    for change in changes:
        if change.step is not None and change.step <= step:
            base = base.changed(change.values)
    return base


def settings_now(base: Settings, changes: Iterable[Change]) -> Settings:
    """Return the current settings: process counts apply at once, the rest at the learner's next step."""
    for change in changes:
        counts = {name: value for name, value in change.values.items() if name in COUNTS}
        base = base.changed(counts if change.step is None else change.values)
    return base
